"""Metrics of `raydali bench strategies`: rates, memory and load of the GPUs, and the ratio to one GPU."""

import statistics
from collections.abc import Callable
from typing import Any

from raydali.output import devices

STRATEGIES = {"one": "one GPU", "dp": "DataParallel", "ddp": "DDP", "sync-bn": "DDP + SyncBatchNorm"}
"""The names that --strategies accepts, and what each is called in tables."""
GIB = 1 << 30
Measured = dict[str, Any]


def strategy_name(row: dict[str, Any]) -> str:
    """Describe a row's strategy and the devices that it runs on."""
    if not row["gpus"]:
        return "one process" if row["strategy"] == "one" else f"DDP, {row['processes']} processes"
    return STRATEGIES[row["strategy"]] + (f", {devices(row['gpus'])}" if row["gpus"] > 1 else "")


def balance(loads: list[float]) -> float | None:
    """Return the ratio of the smallest load to the largest; None for fewer than two, or no load."""
    return min(loads) / max(loads) if len(loads) > 1 and max(loads) > 0 else None


def to_one(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Return the ratio of a row's rate to strategy one's with the same precision and loader; None if not measured."""
    same = [
        each["images_per_second"]
        for each in rows
        if (each["strategy"], each["precision"], each["loader"]) == ("one", row["precision"], row["loader"])
    ]
    if not same or same[0] is None or row["images_per_second"] is None:
        return None
    return float(row["images_per_second"] / same[0])


def _rates(measured: Measured) -> list[float]:
    return [each["images_per_second"] for each in measured["rounds"]]


METRICS: dict[str, Callable[[Measured], Any]] = {
    "images_per_second": lambda measured: statistics.median(_rates(measured)),
    "low": lambda measured: min(_rates(measured)),
    "high": lambda measured: max(_rates(measured)),
    "repeats": _rates,
    "loader_wait_fraction": lambda measured: statistics.median(
        each["loader_wait_fraction"] for each in measured["rounds"]
    ),
    "memory": lambda measured: measured["memory"],
    "memory_balance": lambda measured: balance([each["used_bytes"] for each in measured["memory"] or []]),
    "busy_seconds": lambda measured: measured["busy_seconds"],
    "busy_balance": lambda measured: balance(measured["busy_seconds"] or []),
}
"""Metrics of a row, computed from what rank 0 returns. Rates are of all GPUs; loader_wait_fraction is the share of the
time in which GPUs had no data. memory has of each GPU, in bytes, torch's peaks after the warm-up ("allocated_bytes",
"reserved_bytes"), and what the driver reports at the end ("used_bytes", with DALI, CUDA, NCCL and other programs).
busy_seconds is the time per step that each GPU spends in kernels other than NCCL's."""
