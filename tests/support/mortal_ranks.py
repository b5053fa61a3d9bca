"""Ranks as plain gloo processes that die by SIGKILL at chosen points of a step, while the others train on."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from raydali.data.loading.loader import Batch, Loader
from raydali.data.stream.assignment import Assignment
from raydali.data.stream.stream import MicroBatch, Stream
from raydali.launch.worker.checkpointing import Stateful
from raydali.launch.worker.recovery import Recovery
from raydali.launch.worker.step import Step, StepContext
from raydali.measure.meter import EpochMeter
from raydali.train.batchnorm import RunningStatistics
from raydali.train.membership import Membership, announce
from raydali.train.precision import Precision
from raydali.train.step import ForwardBackward
from raydali.train.worker import Worker
from tests.support.ranks import CPU, context

Point = Literal["forward", "before", "in", "after", "update", "agree", "group", "share"]
STREAM = Stream(samples=240, epochs=1, batch_size=3, global_batch_size=15, seed=2)  # 16 steps of 5 micro-batches
AHEAD = 4


@dataclass(frozen=True)
class Death:
    """A rank's death, at a point of a step or of the recovery in it."""

    rank: int
    step: int
    point: Point


@dataclass(frozen=True)
class Outcome:
    """What a survivor reports: its weights and statistics, what it trained on, and when each update ended."""

    weights: dict[str, Any]
    trained: list[int]
    updated: list[float]


class LoadsAhead(Loader):
    """Batches of numbers drawn by id; it begins some batches ahead, as all loaders do."""

    def _load(self, micro_batches: Iterator[MicroBatch]) -> Any:
        queue: list[MicroBatch] = []
        while True:
            while len(queue) <= AHEAD and (more := next(micro_batches, None)) is not None:
                queue.append(more)
            if not queue:
                return
            micro_batch = queue.pop(0)
            draws = [np.random.default_rng(id).standard_normal(6) for id in micro_batch.ids.tolist()]
            yield Batch({"images": torch.tensor(np.array(draws))}, micro_batch)


class Mortal:
    """Where this rank dies; `at` kills it."""

    def __init__(self, deaths: Sequence[Death], rank: int, died: Any) -> None:
        self._points = {(death.step, death.point) for death in deaths if death.rank == rank}
        self._rank, self._died, self.step = rank, died, 0

    def plans(self, point: Point) -> bool:
        return (self.step, point) in self._points

    def at(self, point: Point, *, after: float = 0.0) -> None:
        if self.plans(point):
            time.sleep(after)
            self._died[self._rank] = time.time()
            os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, world_size: int, port: int, deaths: Sequence[Death], late: Any, died: Any, queue: Any) -> None:
    """Train to the end of the stream. `late` has steps whose sum this rank, unlike others, does not get."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    mortal = Mortal(deaths, rank, died)

    def connect() -> Any:
        return dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]

    class MortalMembership(Membership):
        def _exchange(self, report: dict[str, Any]) -> list[dict[str, Any]]:
            mortal.at("agree")
            return super()._exchange(report)

        def _group(self, timeout: Any) -> Any:
            mortal.at("group")
            return super()._group(timeout)

    class MortalWorker(Worker):
        def all_reduce(self, tensor: torch.Tensor) -> None:
            mortal.at("before")
            if mortal.plans("in"):
                threading.Thread(target=mortal.at, args=("in",), kwargs={"after": 0.0005}, daemon=True).start()
            if mortal.step in late.get(rank, ()):
                late[rank].remove(mortal.step)
                super().all_reduce(tensor.clone())
                assert self.membership is not None
                self.membership.call(threading.Event().wait)  # until ranks are lost
            super().all_reduce(tensor)
            mortal.at("after")

    class MortalRecovery(Recovery):
        def _share_state(self, source: int, **options: bool) -> None:
            mortal.at("share")
            super()._share_state(source, **options)

    dist.init_process_group("gloo", store=connect(), rank=rank, world_size=world_size)
    membership = MortalMembership(connect, rank, world_size)
    worker = MortalWorker(rank=rank, world_size=world_size, device=CPU, cpus=1, node=str(rank), membership=membership)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    count, precision = STREAM.micro_batches_per_step, Precision("fp32", CPU)
    own = STREAM.micro_batches_of(rank, world_size)
    statistics = RunningStatistics(model, micro_batches=own, all_micro_batches=count, each_step=world_size > 1)
    differentiated = ForwardBackward(model, lambda x: model(x).square().mean(), worker, precision, micro_batches=count)
    loader = LoadsAhead(_Nothing(), _Nothing(), STREAM, rank=rank, world_size=world_size)  # type: ignore[arg-type]
    batches = loader.by_step()
    assigned = loader.assigned
    assert isinstance(assigned, Assignment)
    parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer}
    recovery = MortalRecovery(worker, membership, assigned, parts, statistics) if world_size > 1 else None
    shared = StepContext(own, 3, model, statistics, precision, lambda: None, recovery)
    meter = EpochMeter(CPU, rank=rank, world_size=world_size, node="")
    trained: list[int] = []
    updated: list[float] = []
    for index in range(STREAM.steps):
        mortal.step = index
        step = Step(
            shared,
            batches,
            meter,
            index=index,
            ends_epoch=index == STREAM.steps - 1,
            on_update=lambda done: trained.extend(batch.number for batch in done),
        )
        for batch in step:
            mortal.at("forward")
            step.backward(differentiated, batch["images"])
        step.update(optimizer)
        mortal.at("update")
        updated.append(time.time())
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    queue.put((rank, Outcome(weights, trained, updated)))
    queue.close()
    queue.join_thread()
    os._exit(0)  # groups with lost ranks cannot be left in order


class _Nothing:
    """The source and the pipeline of LoadsAhead, which makes its tensors itself."""

    path = staticmethod(str)

    def __len__(self) -> int:
        return STREAM.samples

    def finish(self, tensors: Any) -> Any:
        return tensors


def run_mortal(
    world_size: int, deaths: Sequence[Death] = (), late: dict[int, set[int]] | None = None
) -> tuple[dict[int, Outcome], float]:
    """The outcomes of the survivors, and the most seconds from a death to the end of a survivor's next update.

    This process hosts the store, and announces each rank that ends without an outcome.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    queue, died = context.Queue(), context.Array("d", world_size)
    arguments = world_size, store.port, deaths, late or {}, died, queue
    processes = {rank: context.Process(target=train, args=(rank, *arguments)) for rank in range(world_size)}
    for process in processes.values():
        process.start()
    try:
        running, losses = {process.sentinel: rank for rank, process in processes.items()}, 0
        outcomes: dict[int, Outcome] = {}
        while running:
            ended = wait([*running], timeout=60)
            assert ended, f"ranks {[*running.values()]} do not end"
            while not queue.empty():
                rank, outcome = queue.get()
                outcomes[rank] = outcome
            for sentinel in ended:
                rank = running.pop(sentinel)  # type: ignore[arg-type]
                processes[rank].join()
                assert processes[rank].exitcode in (0, -signal.SIGKILL), f"rank {rank} failed"
                if processes[rank].exitcode:
                    announce(store, losses, rank)
                    losses += 1
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    times = [at for at in died[:] if at]
    later = [[ended - at for ended in each.updated if ended > at] for each in outcomes.values() for at in times]
    return outcomes, max((min(seconds) for seconds in later if seconds), default=0.0)
