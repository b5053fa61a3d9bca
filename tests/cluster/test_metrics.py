"""A submitted run as it is watched: Ray's Prometheus port, Debian's prometheus, the dashboard's Train tab."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from raydali.launch.worker.run_meter import GAUGES
from raydali.report.tensorboard import events_of
from raydali.run.folder import RunFolder
from tests.support.cluster import ROOT, environment, free_ports, head
from tests.support.dashboard import GPU_ONLY, expressions, metrics, metrics_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOKEN = "0123456789abcdef" * 4
NAME = "watched"
RATE_SECONDS = 20


@dataclass(frozen=True)
class Watched:
    """A run that goes on for as long as the tests look at it."""

    dashboard: str
    discovery: Path
    folder: RunFolder


def get(url: str, timeout: float = 10) -> str:
    with urlopen(Request(url, headers={"Authorization": f"Bearer {TOKEN}"}), timeout=timeout) as reply:
        return str(reply.read().decode())


def wait_for(condition: Callable[[], Any], timeout: float) -> Any:
    """What the condition gives once it is something, or the last it gave."""
    deadline = time.monotonic() + timeout
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return value


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    from ray.job_submission import JobSubmissionClient  # takes half a second

    path = tmp_path_factory.mktemp("watched")
    (home := path / "home").mkdir()
    env = environment(home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN, RAY_USAGE_STATS_ENABLED="0")
    with head(env | {"RAY_metrics_report_interval_ms": "2000"}, path / "head") as address:
        client = JobSubmissionClient(address, headers={"Authorization": f"Bearer {TOKEN}"})
        job = client.submit_job(
            entrypoint=f"python jobs/imagenet.py --epochs 2000 --price 1 --storage {path} --name {NAME}",
            runtime_env={"working_dir": str(ROOT)},
        )
        folder = RunFolder(str(path), NAME)
        try:
            assert wait_for(lambda: len(folder.rows("epochs.jsonl")) >= 2, 120), client.get_job_logs(job)
            yield Watched(address, Path(f"/tmp/rd-{os.getpid()}/prom_metrics_service_discovery.json"), folder)
            assert client.get_job_status(job) == "RUNNING", client.get_job_logs(job)
        finally:
            client.stop_job(job)
            wait_for(lambda: client.get_job_status(job).is_terminal(), 30)


def scraped(run: Watched) -> str:
    """What all nodes export, with no token: they ask for none."""
    hosts = [host for group in json.loads(run.discovery.read_text()) for host in group["targets"]]
    texts = []
    for host in hosts:
        # A port may be named before anybody listens there.
        with suppress(URLError), urlopen(f"http://{host}/metrics", timeout=10) as reply:
            texts.append(reply.read().decode())
    return "\n".join(texts)


def samples(text: str, name: str) -> dict[str, float]:
    """By their labels, the values of a metric."""
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(f"{name}{{")]
    return {labels: float(value) for labels, _, value in lines}


def test_every_metric_of_the_dashboard_is_exported(run: Watched) -> None:
    needed = metrics() - GPU_ONLY

    def missing() -> set[str]:
        text = scraped(run)
        return {name for name in needed if not samples(text, name)}

    def images() -> list[float]:
        return list(samples(scraped(run), "ray_raydali_images_total").values())

    assert wait_for(lambda: not missing(), 40), missing()
    assert wait_for(lambda: min(images()) >= 1408 / 2, 20) and len(images()) == 2, images()
    text = scraped(run)
    for labels in samples(text, "ray_raydali_images_total"):
        assert f'run="{NAME}"' in labels and re.search(r'rank="[01]"', labels), labels
    for name in ("of_ceiling", "loader_wait"):
        shares = samples(text, f"ray_raydali_{name}_ratio").values()
        assert shares and all(0 <= share < 2 for share in shares), shares
    assert all(50e6 < size < 50e9 for size in samples(text, "ray_raydali_host_memory_bytes").values())
    assert list(samples(text, "ray_raydali_restarts_total").values()) == [0.0]
    assert list(samples(text, "ray_raydali_quarantined_total").values()) == [0.0]
    for name, help_text in GAUGES.items():
        if f"ray_{name}" not in GPU_ONLY:
            assert f"# HELP ray_{name} {help_text}" in text and f"# TYPE ray_{name} gauge" in text
    assert "# TYPE ray_raydali_images_total counter" in text


def test_prometheus_answers_every_query_of_the_dashboard(run: Watched, tmp_path: Path) -> None:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("needs the program prometheus: apt-get install prometheus")
    (port,) = free_ports(1)
    discovery = {"job_name": "ray", "file_sd_configs": [{"files": [str(run.discovery)]}]}
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [discovery]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [binary, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    values = {"$__rate_interval": f"{RATE_SECONDS}s", "$run": NAME}

    def ask(expression: str) -> Any:
        for variable, value in values.items():
            expression = expression.replace(variable, value)
        try:
            reply = json.loads(get(f"http://127.0.0.1:{port}/api/v1/query?{urlencode({'query': expression})}"))
        except URLError as error:
            if getattr(error, "code", None):  # it has answered: the query is wrong
                raise
            return []  # not yet there
        assert reply["status"] == "success", reply
        return reply["data"]["result"]

    queries = [expression for expression in expressions() if not metrics_in(expression) & GPU_ONLY]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for query in queries:
            assert wait_for(partial(ask, query), 40), (query, (tmp_path / "log").read_text())
        (total,) = ask(queries[0])
        assert total["metric"] == {"run": NAME} and float(total["value"][1]) > 0
        for expression in set(expressions()) - set(queries):
            assert ask(expression) == []
    finally:
        process.terminate()
        process.wait(30)


def test_the_train_tab_of_the_dashboard_knows_the_run(run: Watched) -> None:
    (found,) = json.loads(get(f"{run.dashboard}/api/train/v2/runs/v1", timeout=30))["train_runs"]
    assert (found["name"], found["status"]) == (NAME, "RUNNING")
    (attempt,) = found["attempts"]
    assert [worker["world_rank"] for worker in attempt["workers"]] == [0, 1]


def test_tensorboard_has_the_epochs(run: Watched) -> None:
    rows = run.folder.rows("epochs.jsonl")

    def events() -> list[Any]:
        files = [run.folder.read(f"tensorboard/{file}") for file in run.folder.files("tensorboard")]
        return [event for contents in files for event in events_of(contents)]

    assert wait_for(lambda: len(events()) > 1 + len(rows), 20)
    first, start, *of_epochs = events()
    assert first.file_version == "brain.Event:2" and start.session_log.status == 1
    for row, event in zip(rows, of_epochs, strict=False):
        values = {value.tag: value.simple_value for value in event.summary.value}
        assert event.step == row["step"]
        assert values["train/loss"] == pytest.approx(row["loss"])
        assert values["validation/top1"] == pytest.approx(row["validation"]["top1"])
