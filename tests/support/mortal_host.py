"""The host of ranks that die (mortal_ranks.py): it starts them, announces each death, and may start replacements.

Where ranks are replaced, another process joins the others while they train: a spare that waits for that, or one that is
started after the death.
"""

import signal
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from raydali.train.roster import announce_loss
from tests.support.mortal_ranks import Death, Outcome, train
from tests.support.ranks import CPU, context


def run_mortal(
    world_size: int,
    deaths: Sequence[Death] = (),
    late: dict[int, set[int]] | None = None,
    *,
    slow: int | None = None,
    replaces: bool = False,
    spares: int = 0,
    device: torch.device = CPU,
) -> tuple[dict[int, Outcome], int, float]:
    """The outcomes of the last ranks, the deaths, and the most seconds from one to a survivor's next update's end.

    This process hosts the store, announces each process that dies, and may start a replacement. Spares wait for deaths.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    queue, died = context.Queue(), context.Array("d", max(1, len(deaths)))
    completes = replaces or 0 < spares >= len(deaths)  # so that no spare comes too late
    arguments = world_size, store.port, deaths, late or {}, slow, completes, device, died, queue
    started: list[Any] = []
    running: dict[int, tuple[str, Any]] = {}

    def start(rank: int = -1) -> None:
        name = None if rank >= 0 else f"joins as number {len(started)}"
        process = context.Process(target=train, args=(rank, name, *arguments))
        process.start()
        started.append(process)
        running[process.sentinel] = name or str(rank), process

    outcomes: dict[int, Outcome] = {}
    try:
        for rank in range(world_size):
            start(rank)
        for _ in range(spares):
            start()
        while running:
            ended = wait([*running, queue._reader], timeout=60)  # type: ignore[attr-defined]
            assert ended, f"processes do not end: {[name for name, _ in running.values()]}"
            while not queue.empty():
                rank, outcome = queue.get()
                outcomes[rank] = outcome
            for sentinel in {*ended} & {*running}:
                name, process = running.pop(sentinel)  # type: ignore[arg-type]
                process.join()
                assert process.exitcode in (0, -signal.SIGKILL), f"process {name} failed"
                if process.exitcode:
                    announce_loss(store, name)
                    if replaces:
                        start()
            if len(outcomes) == len(running):
                store.set("over", "")
    finally:
        for process in started:
            process.kill()
            process.join()
    times = [at for at in died[:] if at]
    later = [[ended - at for ended in each.updated if ended > at] for each in outcomes.values() for at in times]
    return outcomes, len(times), max((min(each) for each in later if each), default=0.0)
