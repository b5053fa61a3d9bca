"""cluster/grafana.json as tests read it: its queries, and the names of metrics in them."""

import json
import re
from typing import Any

from tests.support.cluster import ROOT

DASHBOARD: dict[str, Any] = json.loads((ROOT / "cluster/grafana.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
GPU_ONLY = {
    "ray_raydali_gpu_memory_bytes",
    "ray_raydali_energy_kwh",
    "ray_node_gpus_utilization",
    "ray_node_gram_used",
}
"""Metrics that only a node with a GPU has."""
_METRIC = re.compile(r"\bray_\w+(?=\{|\[|\)|,| |$)")
_LABELS = re.compile(r"\b(?:by|on|without) \([^)]*\)|\{[^}]*\}")


def expressions() -> list[str]:
    """Every query of the dashboard."""
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def metrics_in(expression: str) -> set[str]:
    """The names of metrics, not of labels, in a query."""
    return set(_METRIC.findall(_LABELS.sub("", expression)))


def metrics() -> set[str]:
    """The names of all metrics on the dashboard, those that its variables ask for included."""
    definitions = [each["definition"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    return set().union(*map(metrics_in, [*expressions(), *definitions]))
