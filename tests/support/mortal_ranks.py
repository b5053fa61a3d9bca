"""Ranks as plain processes that die by SIGKILL at chosen points of a step, while the others train on.

They sum gradients with gloo, or with NCCL on one GPU that they share. `mortal_host.py` starts them.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import repeat
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
from raydali.launch.worker.step import Step
from raydali.launch.worker.step_context import StepContext
from raydali.measure.meter import EpochMeter
from raydali.train.batchnorm import RunningStatistics
from raydali.train.evaluation import multi_label
from raydali.train.membership import Membership, NotReplacedError
from raydali.train.precision import Precision
from raydali.train.step import WARM_UP_STEPS, ForwardBackward
from raydali.train.update_backup import UpdateBackup
from raydali.train.warmup import warm_up
from raydali.train.worker import Worker
from tests.support.ranks import CPU

Point = Literal[
    "forward",
    "before",
    "in",
    "after",
    "update",
    "agree",
    "group",
    "share",
    "ask",
    "wait",
    "call 0",
    "call 1",
    "call 2",
    "call 3",
    "call 4",
]
STREAM = Stream(samples=240, epochs=1, batch_size=3, global_batch_size=15, seed=2)  # 16 steps of 5 micro-batches
AHEAD = 4
COMPLETE_AT = 10, 15
"""Steps before which ranks wait for replacements, where there are some. After them, and after the first of
EPOCHS_END_AT, all ranks validate their shares."""
EPOCHS_END_AT = 5, 10, 15
CALLS_AT = 9
"""A step after which ranks call each other as for a checkpoint."""
SLOW_SECONDS = 1.0


@dataclass(frozen=True)
class Death:
    """The death of a process, at a point of a step or of the recovery in it, at most once.

    Attributes:
        rank: its rank; -1 before a process that joins the others has one.
        step: the step; -1 in warm-up steps, or before the first step of a process that joins.
        joined: whether it is a process that joins, and not one of the first ranks.
    """

    rank: int
    step: int
    point: Point
    joined: bool = False


@dataclass(frozen=True)
class Outcome:
    """A rank reports its weights and statistics, what it trained on, and when each update ended.

    Attributes:
        of_lost_ranks: what lost ranks have trained on, as this rank knows it.
        validated: the sums over all ranks after steps, as far as it was there.
        taken_over: what a replacement took over besides weights.
    """

    weights: dict[str, Any]
    trained: list[int]
    updated: list[float]
    of_lost_ranks: list[int]
    taken_over: dict[str, Any]
    validated: dict[int, list[float]]


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
    """Kills this process, at the points where it is to die. `died` has the time of each death so far."""

    def __init__(self, deaths: Sequence[Death], rank: int, *, joined: bool, died: Any) -> None:
        self._deaths, self._joined, self._died = deaths, joined, died
        self.rank, self.step, self.calls = rank, -1 if joined else -2, 0

    def planned(self, point: Point) -> int | None:
        here = Death(self.rank, self.step, point, self._joined)
        return next(
            (index for index, death in enumerate(self._deaths) if death == here and not self._died[index]), None
        )

    def at(self, point: Point, *, after: float = 0.0) -> None:
        if (index := self.planned(point)) is not None:
            time.sleep(after)
            self._died[index] = time.time()
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    rank: int,
    name: str | None,
    world_size: int,
    port: int,
    deaths: Sequence[Death],
    late: Any,
    slow: int | None,
    replaces: bool,
    device: torch.device,
    died: Any,
    queue: Any,
) -> None:
    """Train to the end of the stream. `late` has steps whose sum this rank, unlike others, does not get.

    The rank `slow` comes to the last call after CALLS_AT when others have begun the next step. A process with a name
    joins the others. On a GPU, the forward and backward passes are a CUDA graph.
    """
    # Ranks of one host may not share a GPU.
    os.environ.update({"NCCL_HOSTID": name or str(rank), "NCCL_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    mortal = Mortal(deaths, rank, joined=name is not None, died=died)

    class SlowStore(dist.TCPStore):  # type: ignore[misc, name-defined]
        """The first ranks hear later than others of those that are admitted."""

        def get(self, key: str) -> bytes:
            content: bytes = super().get(key)
            if name is None and b"admits" in content:
                time.sleep(0.05)
            return content

    def connect() -> Any:
        return SlowStore("127.0.0.1", port, is_master=False)

    class MortalMembership(Membership):
        def ask(self, on_wait: Callable[[], None]) -> bool:
            mortal.at("ask")
            if any(death.point == "wait" for death in deaths):  # those that wait for this process die before it asks
                with self._changed:
                    self._changed.wait_for(lambda: self._roster.lost >= len(deaths), timeout=1)
            waited = super().ask(on_wait)
            mortal.rank = self.rank
            return waited

        def admit(self, *, first: bool) -> None:
            super().admit(first=first)
            time.sleep(0.02)  # those that are admitted begin to agree

        def wait_until_complete(self, gives_up: Callable[[], bool] = lambda: False) -> bool:
            mortal.at("wait")
            return super().wait_until_complete(gives_up)

        def _exchange(self, report: dict[str, Any]) -> list[dict[str, Any]]:
            mortal.at("agree")
            return super()._exchange(report)

        def _groups(self) -> Any:
            mortal.at("group")
            return super()._groups()

    class MortalWorker(Worker):
        misses_sum = False

        def _call(self, function: Callable[[], Any]) -> Any:
            mortal.at(f"call {mortal.calls}")  # type: ignore[arg-type]
            mortal.calls += 1
            return super()._call(function)

        def all_reduce(self, tensor: torch.Tensor, *, waits: bool = True) -> None:
            mortal.at("before")
            if mortal.planned("in") is not None:
                threading.Thread(target=mortal.at, args=("in",), kwargs={"after": 0.0005}, daemon=True).start()
            super().all_reduce(tensor, waits=waits)
            if mortal.step in late.get(mortal.rank, ()):
                late[mortal.rank].remove(mortal.step)
                tensor.fill_(torch.nan)
                self.misses_sum = True
            mortal.at("after")

        def queued(self) -> Callable[[], Any]:
            if not self.misses_sum:
                return super().queued()
            self.misses_sum = False
            assert self.membership is not None
            return partial(self.membership.call, threading.Event().wait)  # until ranks are lost

    class MortalRecovery(Recovery):
        def _share_state(self, source: int, before: Any, **options: bool) -> None:
            mortal.at("share")
            super()._share_state(source, before, **options)

    membership = MortalMembership(connect, max(rank, 0), world_size, name=name, device=device)
    if name is not None:
        worker: Worker = MortalWorker.replace(device, membership, cpus=1, node=name)
    else:
        dist.init_process_group("gloo", store=connect(), rank=rank, world_size=world_size)
        worker = MortalWorker.join(device, cpus=1, node=str(rank), gradients=False)
        worker = worker.as_member(membership, timedelta(minutes=30))
    torch.manual_seed(name is not None)
    convolution = nn.Conv2d(6, 8, 1).to(memory_format=torch.channels_last)
    first_layers = nn.Unflatten(1, (6, 1, 1)), convolution, nn.Flatten()
    model = nn.Sequential(*first_layers, nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=device.type == "cuda")
    count, precision, graph = STREAM.micro_batches_per_step, Precision("fp32", device), device.type == "cuda"
    own = STREAM.micro_batches_of(worker.share, world_size)
    statistics = RunningStatistics(model, micro_batches=own, all_micro_batches=count, each_step=world_size > 1)
    differentiated = ForwardBackward(
        model, lambda x: model(x).square().mean(), worker, precision, micro_batches=count, graph=graph
    )
    if graph:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(WARM_UP_STEPS + 1):
            differentiated(torch.ones(STREAM.batch_size, 6, device=device), last=False)
            optimizer.zero_grad(set_to_none=True)
        model.load_state_dict(before)
    loader = LoadsAhead(_Nothing(), _Nothing(device), STREAM, rank=worker.share, world_size=world_size)  # type: ignore[arg-type]
    parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer}
    run = _Run(str(rank) if name is None else "")
    recovery = MortalRecovery(worker, membership, parts, run, statistics) if world_size > 1 else None
    first, settles = 0, False
    try:
        if recovery is not None and name is not None:
            first, settles = recovery.join(loader, on_wait=lambda: None)
    except NotReplacedError:
        return  # nobody needed this spare
    batches = loader.by_step(first)
    assigned = loader.assigned
    assert isinstance(assigned, Assignment)
    if recovery is not None:
        recovery.assignment = assigned
    shared = StepContext(
        worker,
        own,
        3,
        model,
        statistics,
        precision,
        lambda: None,
        recovery,
        differentiated,
        apart=world_size > 1,
        backup=UpdateBackup() if world_size > 1 else None,
    )
    meter = EpochMeter(device, rank=rank, world_size=world_size, node="")
    if name is None:
        rehearse(shared, meter, optimizer, mortal)
    trained: list[int] = []
    updated: list[float] = []
    validated: dict[int, list[float]] = {}
    for index in range(first - settles, STREAM.steps):
        mortal.step, mortal.calls = index, 0
        if recovery is not None and replaces and index in COMPLETE_AT and index >= first:
            assert recovery.await_replacements(index, lambda: False)
        step = Step(
            shared,
            batches,
            meter,
            index=index,
            ends_epoch=replaces and index in EPOCHS_END_AT,
            finished=index < first,
            on_update=lambda done: trained.extend(batch.number for batch in done),
        )
        goes_on = True
        while goes_on:
            for batch in step:
                mortal.at("forward")
                step.backward(differentiated, batch["images"])
            step.update(optimizer)
            goes_on = step.goes_on()
        mortal.at("update")
        updated.append(time.time())
        if index in EPOCHS_END_AT and (replaces or world_size == 1):
            validated[index] = validate(model, worker, world_size)
        elif index == CALLS_AT:
            assert len(worker.exchange(index)) == worker.world_size
            worker.gather(index)
            if rank == slow:
                time.sleep(SLOW_SECONDS)
            assert worker.from_first(index) == index
    if recovery is not None:
        recovery.settle()
        recovery.end()
    for weight in model.parameters() if device.type == "cpu" else ():  # on a GPU, gradients have strides of their own
        assert optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()  # fused optimizers need it
    weights = {name: tensor.cpu().numpy() for name, tensor in model.state_dict().items()}
    of_lost_ranks = [batch.number for _, batch in assigned.of_lost_ranks(0, STREAM.steps)]
    queue.put((worker.share, Outcome(weights, trained, updated, of_lost_ranks, run.state_dict(), validated)))
    queue.close()
    queue.join_thread()
    connect().wait(["over"])  # until all have left their last call
    os._exit(0)  # groups with lost ranks cannot be left in order


def rehearse(shared: StepContext, meter: EpochMeter, optimizer: torch.optim.Optimizer, mortal: Mortal) -> None:
    """Train two warm-up steps, which are undone."""
    mortal.step = -1
    resident = Batch(
        {"images": torch.ones(STREAM.batch_size, 6, device=shared.worker.device)}, STREAM.micro_batch(0, 0)
    )
    steps = warm_up(
        lambda: Step(shared, repeat(resident), meter),
        [shared.model],
        optimizer,
        shared.precision,
        shared.worker,
        steps=2,
        images=1,
        measures_ceiling=False,
    )
    assert shared.differentiated is not None
    for step in steps:
        for batch in step:
            mortal.at("forward")
            step.backward(shared.differentiated, batch["images"])
        step.update(optimizer)
        mortal.at("update")


def validate(model: nn.Module, worker: Worker, world_size: int) -> list[float]:
    """Return results over all samples, of which each rank has a share, by which one sees how often a rank's counts."""
    samples = np.arange(60)[worker.share :: world_size]
    draws = torch.tensor(np.array([np.random.default_rng(id).standard_normal(6) for id in samples.tolist()]))
    draws = draws.to(worker.device)
    model.eval()
    with torch.no_grad():
        mine = model(draws).abs().sum().cpu()
    model.train()
    total, count = worker.sum(torch.stack([mine, torch.tensor(1.0 * len(samples))])).tolist()
    of_ranks = worker.exchange([worker.share, float(mine)])
    assert sorted(share for share, _ in of_ranks) == [*range(world_size)]
    np.testing.assert_allclose(sum(value for _, value in of_ranks), total, rtol=1e-9)
    labels = torch.tensor([[id % 3 == 0] for id in samples.tolist()], device=worker.device).long()
    batch = Batch({"images": draws, "labels": labels}, MicroBatch(0, 0, 0, samples, samples * 0))
    metrics = multi_label.evaluate(model, [batch], worker, Precision("fp32", worker.device))
    worker.barrier()
    return [total, count, metrics["images"], metrics["map"], metrics["accuracy"]]


class _Nothing:
    """The source and the pipeline of LoadsAhead, which makes its tensors itself."""

    path = staticmethod(str)

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device

    def __len__(self) -> int:
        return STREAM.samples

    def finish(self, tensors: Any) -> Any:
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}


class _Run:
    """It stands for the part of a run that only a replacement takes over."""

    def __init__(self, of_rank: str) -> None:
        self._of_rank = of_rank

    def state_dict(self) -> dict[str, Any]:
        return {"of_rank": self._of_rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._of_rank = state["of_rank"]
