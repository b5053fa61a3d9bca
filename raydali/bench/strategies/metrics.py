"""What `raydali bench strategies` says of a row: rates, memory and load of its GPUs, and how it compares to one GPU."""

import statistics
from typing import Any

from raydali.output import devices

STRATEGIES = {"one": "one GPU", "dp": "DataParallel", "ddp": "DDP", "sync-bn": "DDP + SyncBatchNorm"}
"""The names that --strategies accepts, and what each is called in tables."""
GIB = 1 << 30


def strategy_name(row: dict[str, Any]) -> str:
    """Describe a row's strategy and the devices that it runs on."""
    if not row["gpus"]:
        return "one process" if row["strategy"] == "one" else f"DDP, {row['processes']} processes"
    return STRATEGIES[row["strategy"]] + (f", {devices(row['gpus'])}" if row["gpus"] > 1 else "")


def figures(measured: dict[str, Any]) -> dict[str, Any]:
    """What a row says of what its processes measured.

    Returns:
        {"images_per_second" (over all GPUs, the median), "low", "high", "repeats" (each one's rate),
        "loader_wait_fraction" (of the time in which GPUs had no data, the median), "memory" (of each GPU, bytes:
        "allocated_bytes" and "reserved_bytes" are torch's peaks behind the warm-up; "used_bytes" is what the driver
        says is taken at the end, by DALI, CUDA, NCCL and other programs too), "memory_balance" (the smallest to the
        largest "used_bytes"), "busy_seconds" (that each GPU computes for a step, in any kernel but NCCL's), and
        "busy_balance" (the smallest to the largest of these)}. Balances are null where there are no two GPUs.
    """
    rates = [each["images_per_second"] for each in measured["rounds"]]
    memory, busy = measured["memory"], measured["busy_seconds"]
    return {
        "images_per_second": statistics.median(rates),
        "low": min(rates),
        "high": max(rates),
        "repeats": rates,
        "loader_wait_fraction": statistics.median(each["loader_wait_fraction"] for each in measured["rounds"]),
        "memory": memory,
        "memory_balance": balance([each["used_bytes"] for each in memory or []]),
        "busy_seconds": busy,
        "busy_balance": balance(busy or []),
    }


def balance(loads: list[float]) -> float | None:
    """The smallest load to the largest: 1 where all bear the same. Null for fewer than two, or none at all."""
    return min(loads) / max(loads) if len(loads) > 1 and max(loads) > 0 else None


def to_one(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """The row's rate to that of strategy one in the same precision with the same loader; null where one has none."""
    same = [
        each["images_per_second"]
        for each in rows
        if (each["strategy"], each["precision"], each["loader"]) == ("one", row["precision"], row["loader"])
    ]
    if not same or same[0] is None or row["images_per_second"] is None:
        return None
    return float(row["images_per_second"] / same[0])


NOTHING = dict.fromkeys(
    (
        "images_per_second",
        "low",
        "high",
        "repeats",
        "loader_wait_fraction",
        "memory",
        "memory_balance",
        "busy_seconds",
        "busy_balance",
    )
)
"""The figures of a row that could not be measured."""
