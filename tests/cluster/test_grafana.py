"""cluster/grafana.json without a cluster: the form that Grafana takes, and queries that can be asked."""

import json
import re
import shutil
import subprocess
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import ray.dashboard.modules.reporter.reporter_agent as reporter

from raydali.launch.driver.recorder import HELD, LEDGER_GAUGES, QUARANTINED, RESTARTS
from raydali.launch.worker.run_meter import GAUGES, IMAGES
from tests.support.dashboard import DASHBOARD, GPU_ONLY, PANELS, expressions, metrics, metrics_in

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COUNTERS = IMAGES, RESTARTS, QUARANTINED
OF_LEDGER = [HELD, *(name for name, _ in LEDGER_GAUGES.values())]
OURS = {f"ray_{name}_total" for name in COUNTERS} | {f"ray_{name}" for name in [*GAUGES, *OF_LEDGER]}


def test_every_metric_exists_and_all_of_ours_are_shown() -> None:
    of_nodes = {f"ray_{name}" for name in reporter.METRICS_GAUGES}
    assert metrics() <= OURS | of_nodes
    assert metrics() >= OURS | GPU_ONLY


def test_every_query_asks_the_datasource_that_was_chosen() -> None:
    assert {panel["type"] for panel in PANELS} == {"timeseries", "stat"}
    for panel in PANELS:
        assert panel["datasource"] == SOURCE and panel["targets"], panel["title"]
        assert all(target["datasource"] == SOURCE for target in panel["targets"])
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids)
        assert panel["title"] and all(target["legendFormat"] for target in panel["targets"])


def test_every_figure_of_ours_is_of_the_run_that_was_chosen() -> None:
    for expression in expressions():
        if metrics_in(expression) & OURS:
            assert expression.count('{run=~"$run"}') == len(re.findall(r"\bray_raydali_\w+", expression)), expression


def test_variables_are_defined() -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert {name: each["type"] for name, each in variables.items()} == {"datasource": "datasource", "run": "query"}
    assert variables["run"]["datasource"] == SOURCE and variables["run"]["includeAll"] and variables["run"]["multi"]
    assert variables["run"]["query"]["query"] == variables["run"]["definition"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == {*variables, "__rate_interval"}


def test_panels_lie_side_by_side() -> None:
    def place(panel: dict[str, Any]) -> tuple[int, int, int, int]:
        at = panel["gridPos"]
        return at["x"], at["y"], at["x"] + at["w"], at["y"] + at["h"]

    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(left >= 0 and right <= 24 for left, _, right, _ in map(place, panels))
    for one, other in combinations(map(place, panels), 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    tops = [panel["gridPos"]["y"] for panel in panels]
    assert all(above <= below for above, below in pairwise(tops))
    assert DASHBOARD["uid"] and DASHBOARD["schemaVersion"] == 42, "the last that this form of dashboards has"
    assert "id" not in DASHBOARD, "Grafana gives it"


def test_names_of_metrics_are_found_in_queries() -> None:
    query = 'topk(5, ray_a{ray_label=~"ray_b"}) / on (ray_c) sum by (ray_d) (rate(ray_e_total[1m])) > ray_f'
    assert metrics_in(query) == {"ray_a", "ray_e_total", "ray_f"}


def test_promtool_understands_every_query(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs the program promtool: apt-get install prometheus")
    asked = [expression.replace("$__rate_interval", "1m").replace("$run", "pets") for expression in expressions()]
    rules = [{"record": f"query_{number}", "expr": expression} for number, expression in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        [promtool, "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
