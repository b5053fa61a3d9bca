"""Runs with one thing wrong, each planted in a real run of jobs/imagenet.py on plain gloo processes."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia.dali import fn
from torch import nn

import raydali.training.models.classification
from jobs.imagenet import DIGITS, Config, Data, train
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.dali_loader import DaliLoader
from raydali.data.read import local_files
from raydali.data.read.reading import timed
from raydali.data.tasks.classification import TrainImages
from raydali.run.folder import RunFolder
from raydali.training.worker import Worker
from tests.support.pictures import encoded, photograph
from tests.support.ranks import LocalSession, folder_of, run_ranks

Plant = Callable[[int], None]
"""Called with the rank, in its process, before it trains."""

CONFIG = replace(
    DIGITS,
    data="given",
    label_smoothing=0.1,
    epochs=2,
    batch_size=16,
    global_batch_size=16,
    image_size=64,
    resize_size=64,
)
SLOW_STEPS = {"image_size": 160, "resize_size": 160}
"""Some 100 ms on one thread: beside it, loading small images is nothing."""


def pictures(folder: Path, *, train: int = 480, val: int = 8, size: tuple[int, int] = (96, 96)) -> Data:
    """Two classes of JPEGs, of one picture each."""
    for part, amount in (("train", train), ("val", val)):
        for label, name in enumerate(("china", "flower")):
            of_class = folder / part / str(label)
            of_class.mkdir(parents=True)
            first, *others = (of_class / f"{i:04}.jpg" for i in range(label, amount, 2))
            first.write_bytes(encoded(photograph(name, size)))
            for path in others:
                path.hardlink_to(first)
    return Data(*(LabeledFiles.scan(str(folder / part)) for part in ("train", "val")))


def lines(world_size: int, plant: Plant, config: Config, data: Data, folder: Path) -> list[dict[str, Any]]:
    """The epochs of such a run."""
    made = folder_of(folder)
    size = max(config.global_batch_size or 0, config.batch_size * world_size)
    run_ranks(world_size, _rank, plant, replace(config, global_batch_size=size), data, made)
    return made.rows("epochs.jsonl")


def _go_first() -> None:
    """Before whatever else this machine does, where that is allowed: its work is no part of what is planted."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)


def _rank(plant: Plant, config: Config, data: Data, folder: RunFolder) -> None:
    _go_first()
    if config.gpu:
        cpus = len(os.sched_getaffinity(0)) // dist.get_world_size()
        session = LocalSession(folder, device=torch.device("cuda", dist.get_rank()), cpus=cpus)
    else:
        session = LocalSession(folder)
    plant(session.worker.rank)
    train(config, data, session)


# ---------------------------------------------------------------------------------------------------------------------
# Plants


def nothing(rank: int) -> None:
    """A healthy run."""


def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The same, that much later."""

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **options)

    return late


def slow_reads(_: int) -> None:
    """Four fifths of a second for each file, 32 at a time for each of four batches."""
    local_files.FEW = 1 << 30  # Python reads them all
    Path.read_bytes = slowed(Path.read_bytes, 0.8)  # type: ignore[method-assign]


def slow_reads_one_by_one(_: int) -> None:
    """A twentieth of a second for each file."""
    Path.read_bytes = slowed(Path.read_bytes, 0.05)  # type: ignore[method-assign]


def slow_reads_of_rank_1(rank: int) -> None:
    if rank == 1:
        slow_reads(rank)


def busy(image: Any) -> Any:
    until = time.perf_counter() + 0.02
    while time.perf_counter() < until:
        pass
    return image


def slow_python(_: int) -> None:
    """20 ms of Python for each image, in DALI's graph."""
    graph = TrainImages.graph

    def with_python(self: TrainImages, *inputs: Any, **options: Any) -> Any:
        images, *rest = graph(self, *inputs, **options)
        return fn.python_function(images, function=timed(busy), output_layouts="HWC"), *rest

    TrainImages.graph = with_python  # type: ignore[method-assign]


def slow_inputs(_: int) -> None:
    """20 ms of Python for each image, before any is decoded."""
    inputs = TrainImages.inputs

    def with_python(self: TrainImages, source: Any, samples: Any) -> Any:
        for _ in samples.ids:
            busy(None)
        return inputs(self, source, samples)

    TrainImages.inputs = with_python  # type: ignore[method-assign]


def _with_model(change: Callable[[nn.Module], nn.Module]) -> None:
    build = raydali.training.models.classification.build_model
    raydali.training.models.classification.build_model = lambda *args, **options: change(build(*args, **options))


def slow_rank_1(rank: int) -> None:
    """Steps of rank 1 take 0.2 s longer."""

    def late(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda model, _: time.sleep(0.2 if model.training else 0))
        return model

    if rank == 1:
        _with_model(late)


def slow_network(_: int) -> None:
    """The sum of gradients takes a fifth of a second longer."""
    Worker.all_reduce = slowed(Worker.all_reduce, 0.2)  # type: ignore[method-assign]


def slow_first_step(_: int) -> None:
    """4 s, as where a model is compiled."""

    def compiling(model: nn.Module) -> nn.Module:
        def first(*_: Any) -> None:
            hook.remove()
            time.sleep(4)

        hook = model.register_forward_pre_hook(first)
        return model

    _with_model(compiling)


def slow_start(_: int) -> None:
    """4 s until the first batch."""
    DaliLoader._build = slowed(DaliLoader._build, 4)  # type: ignore[method-assign]


def slow_start_of_rank_1(rank: int) -> None:
    if rank == 1:
        slow_start(rank)


def slow_checkpoints(_: int) -> None:
    """A second for each on rank 0, while the others go on to their next exchange, as on a cluster."""

    def commit(self: LocalSession, step: int, state: Any, **options: Any) -> None:
        if state is not None:
            time.sleep(1)
            self.checkpoints.save(step, state, **options)

    LocalSession.commit = commit  # type: ignore[method-assign]


def _burn(burning: Any) -> None:
    _go_first()
    burning.release()
    while True:
        pass


@contextmanager
def burners(amount: int) -> Iterator[None]:
    """As many processes that do nothing but compute; they are at it when the block begins."""
    context = multiprocessing.get_context("spawn")
    burning = context.Semaphore(0)
    processes = [context.Process(target=_burn, args=(burning,), daemon=True) for _ in range(amount)]
    try:
        for process in processes:
            process.start()
        for _ in processes:
            assert burning.acquire(timeout=60), "they take longer than a minute to start"
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()
