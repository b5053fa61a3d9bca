"""Rehearses a run: warm-up steps before its first step, and before the first step of another image size.

They train on one batch that stays on the device, to compile, to capture a CUDA graph and to measure the ceiling, which
is the speed of such steps. Then they are undone. All sizes are rehearsed before the first step, the last one first:
what does not fit into memory fails then, and nothing is compiled later. A resume takes the ceiling from its checkpoint
if it was measured under the same conditions, see ceiling.py.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import repeat
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from raydali.data.load.loader import Batch, Loader
from raydali.host import start_clock
from raydali.host.cpu_times import cpu_times
from raydali.host.hardware import COMPILED_VALIDATION_PAYS_FROM
from raydali.launch.worker.ceiling import MAX_SECONDS, Ceiling, RunCeiling, disturbed, on_host, steps_to_measure
from raydali.launch.worker.step import RunParts, Step
from raydali.measure.gpu_busy import busy_seconds
from raydali.measure.meter import EpochMeter
from raydali.run.compile_cache import CompileCache
from raydali.run.events import CeilingMeasured, Rehearsed, SizesRehearsed
from raydali.run.messages import Note
from raydali.training.checkpoint_file import local, snapshot
from raydali.training.cuda_graphs import WARM_UP_STEPS
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.optim import load_momenta
from raydali.training.weights.undrawn import draw_zeros
from raydali.training.worker import Worker

BUSY_STEPS = 3
"""Number of steps that CUPTI observes."""
Taken = TypeVar("Taken")


class Rehearsal:
    """The rehearsal of a run, on one rank. All ranks must call the same methods.

    Args:
        run: the parts of the run.
        loader, val_loader: the loaders of the training set and of the validation set.

    Attributes:
        cache: the compiled code of the run, which may still be written in the background.
    """

    def __init__(self, run: RunParts, loader: Loader, val_loader: Loader) -> None:
        self._run, self._loader, self._val_loader = run, loader, val_loader
        session, config = run.session, run.config
        self._epoch = run.stream.epoch_of(session.cursor.start)
        self._ceiling = RunCeiling(session, run.state)
        self.cache = CompileCache(session.folder, run.worker, session.warn)
        self._steps = warm_up_steps(run.differentiated, run.worker.device)
        self._prepares = run.on_gpu or bool(config.compile)

    def before_first_step(self) -> Iterator[Step]:
        """Yield warm-up steps for all sizes of the epochs that remain.

        A first start also prepares the validation: what does not fit into memory fails then. A resume does so before
        its first validation, and trains again seconds sooner.
        """
        run, is_first = self._run, not self._run.state.is_resumed
        if run.on_gpu:  # on CPUs it would take the cores from the compiler
            self._loader.begin_ahead()
            if is_first:
                self._val_loader.begin_ahead()
        if run.config.compile:
            self.cache.load()
        # Before the steps: a capture frees unused pinned memory, and the last steps pin memory for checkpoints.
        if is_first and self.warm_up_inference():
            start_clock.mark("validation")
        compares = run.session.short_seconds is not None and run.config.ceiling  # what the sizes cost, for a plan
        pipelines = [self._loader.pipeline.in_epoch(epoch) for epoch in range(self._epoch, run.config.epochs)]
        first = [self._epoch + pipelines.index(pipeline) for pipeline in pipelines]  # epoch with an epoch's image size
        later, ceilings = {*first} - {self._epoch} if self._prepares or compares else set[int](), dict[int, float]()
        for epoch in sorted(later, reverse=True):
            run.session.emit_once(Note(f"warm-up steps for the image size of epoch {epoch}"))
            measured = yield from self._warm_up(epoch, self._steps, compares)
            ceilings[epoch] = measured.images_per_second or 0.0
            self._forget()
        measures = run.config.ceiling and is_first
        if self._prepares or measures:
            began = self._announce(measures)
            measured = yield from self._warm_up(self._epoch, self._steps, measures)
            self._ceiling.take(measured, Rehearsed, began)
        ceilings[self._epoch] = run.state.ceiling or 0.0
        if compares and later and all(ceilings.values()):
            run.session.emit_once(SizesRehearsed(costs=[ceilings[self._epoch] / ceilings[epoch] for epoch in first]))
        if run.config.compile:
            self.cache.save()

    def after_epoch(self, record: Mapping[str, Any]) -> Iterator[Step]:
        """Yield warm-up steps if the next epoch has another size, or if this record shows that the ceiling is wrong."""
        run, done, pipeline = self._run, self._run.session.cursor.done, self._loader.pipeline
        if done == run.stream.steps:
            return
        before, self._epoch = run.stream.epoch_of(done - 1), run.stream.epoch_of(done)
        if pipeline.in_epoch(self._epoch) == pipeline.in_epoch(before):
            if self._ceiling.doubts(record):
                began = time.perf_counter()
                measured = yield from self._warm_up(self._epoch, 1, True)
                self._ceiling.take(measured, CeilingMeasured, began, again=True)
            return
        run.state.ceiling = run.state.flops_per_image = run.state.gpu_busy = None
        self._forget()
        if self._prepares or run.config.ceiling:
            began = self._announce(run.config.ceiling)
            measured = yield from self._warm_up(self._epoch, self._steps, run.config.ceiling)
            self._ceiling.take(measured, CeilingMeasured, began)

    def warm_up_inference(self) -> bool:
        """Compile and capture what the validation computes, once; return whether there was something to."""
        run, compiled = self._run, self._compiles_validation()
        graph = run.captures and run.sharding is None  # sharded weights are gathered elsewhere in each validation
        inferences = [*run.inferences] if compiled or graph else []
        run.inferences.clear()
        if inferences:
            batch = self._val_loader.resident_batch(min(run.config.batch_size, self._val_loader.order.samples))
            if compiled:
                run.session.emit_once(Note("compiling the validation"))
            for inference, inputs in inferences:
                inference.warm_up(batch[inputs], compiled=compiled, graph=graph)
        return bool(inferences)

    def _compiles_validation(self) -> bool:
        config, batch = self._run.config, self._run.config.batch_size * self._run.worker.world_size
        validations = sum(map(config.validates, range(self._epoch, config.epochs)))
        batches = validations * -(-self._val_loader.order.samples // batch)
        return bool(config.compile) and self._run.sharding is None and batches >= COMPILED_VALIDATION_PAYS_FROM

    def _announce(self, measures: bool) -> float:
        """Tell what warm-up steps are for; return the time at which they begin."""
        purposes = ["compiling"] if self._run.config.compile else []
        if self._run.captures:
            purposes.append("capturing a CUDA graph")
        if measures:
            purposes.append("measuring the ceiling (--no-ceiling leaves it out)")
        self._run.session.emit_once(Note(f"warm-up steps on one batch: {', '.join(purposes) or 'tuning'}"))
        return time.perf_counter()

    def _warm_up(self, epoch: int, steps: int, measures: bool) -> Generator[Step, None, Ceiling]:
        """Return the generator of warm-up steps on images of the epoch's size; see `warm_up`."""
        run, worker, size = self._run, self._run.worker, self._run.config.batch_size
        batch = Batch(self._loader.resident_batch(size, epoch), run.stream.micro_batch(0, worker.rank))
        meter = EpochMeter(worker.device, rank=worker.rank, world_size=worker.world_size, node=worker.node)
        optimizer = run.state.parts["optimizer"]
        assert isinstance(optimizer, Optimizer)
        newest: list[Step] = []
        counts_flops = run.on_gpu and epoch == self._epoch and run.state.flops_per_image is None

        def take() -> Step:
            if newest:
                newest[-1].check_end()
                for loader in (self._loader, self._val_loader):
                    loader.wait_until_begun()  # it must not disturb what follows the compilation
            newest[:] = [Step(run, repeat(batch), meter, counts_flops=counts_flops and not newest)]
            return newest[0]

        modules = [part for part in run.state.parts.values() if isinstance(part, nn.Module)]
        return warm_up(
            take,
            undone(modules, optimizer, run.precision),
            worker,
            differentiated=run.differentiated,
            steps=steps,
            images=run.micro_batches * size,
            measures=measures,
        )

    def _forget(self) -> None:
        for differentiated in self._run.differentiated:
            differentiated.expect_other_shapes()


def warm_up_steps(differentiated: Sequence[ForwardBackward], device: torch.device) -> int:
    """Return the number of steps after which nothing is compiled, tuned or captured any more; 1 on a CPU.

    The last one is for Muon, which is captured a step after the backward pass.
    """
    most = max((function.warm_up_steps for function in differentiated), default=WARM_UP_STEPS)
    return most + 2 if device.type == "cuda" else 1


def warm_up(
    take: Callable[[], Taken],
    undoing: AbstractContextManager[None],
    worker: Worker,
    *,
    differentiated: Sequence[ForwardBackward],
    steps: int,
    images: int,
    measures: bool,
) -> Generator[Taken, None, Ceiling]:
    """Yield steps, which compile, tune and capture, measure the ceiling, and undo all steps. All ranks must call it.

    Args:
        take: makes a step on a resident batch.
        undoing: undoes them, see `undone`.
        worker: this rank.
        differentiated: the functions that a step calls.
        steps: number of steps before the measurement, see `warm_up_steps`.
        images: number of images in one step of this rank.
        measures: whether to measure the ceiling.

    Returns:
        The ceiling; its values are empty if it was not measured.
    """
    on_gpu = worker.device.type == "cuda"

    def timed(number: int) -> Generator[Taken, None, float]:
        _synchronize(worker.device)
        began = time.perf_counter()
        for _ in range(number):
            yield take()
        _synchronize(worker.device)
        return time.perf_counter() - began

    with undoing:
        seconds = yield from timed(1)
        start_clock.mark("compile")
        if steps > 1:
            seconds += yield from timed(steps - 1)
            start_clock.mark("capture")
        if not measures:
            return Ceiling()
        if not on_gpu and (longest := max(worker.exchange(seconds))) > MAX_SECONDS:
            limit = f"none of more than {MAX_SECONDS:.0f} s is measured"
            return Ceiling(why=f"a step takes {longest:.0f} s, and {limit}")
        before = cpu_times()
        number = steps_to_measure(fmean(worker.exchange((yield from timed(1)))))
        rate = sum(worker.exchange(images * number / (yield from timed(number))))
        after = cpu_times()
        start_clock.mark("ceiling")
        # Other processes on the host hardly affect the steps of a GPU.
        if not on_gpu and (by_others := disturbed(worker.exchange(on_host(worker, before, after)))):
            return Ceiling(why=by_others, void=True)
        if not on_gpu or all(function.is_captured for function in differentiated):
            return Ceiling(rate)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            yield from timed(BUSY_STEPS)
        of_ranks = worker.exchange((busy_seconds(profiler) / BUSY_STEPS, images))
        seconds_of_step = sum(images for _, images in of_ranks) / rate
        busy = fmean(seconds for seconds, _ in of_ranks) / seconds_of_step
        return Ceiling(rate, gpu_busy=min(1.0, busy) or None)


def _synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def undone(modules: Sequence[nn.Module], optimizer: Optimizer, precision: Precision) -> Iterator[None]:
    """Restore weights, buffers, momenta and the loss scale at the end of this context, bit for bit.

    Inside it, weights that were zero are not: steps with gradients of zero would be faster than those of the training.
    Tensors keep their addresses, which a CUDA graph has captured. The host needs memory for a copy of modules and
    momenta.

    Args:
        modules: the modules that a step changes: the model and its moving average.
        optimizer: the optimizer of the model.
        precision: the precision of the steps.
    """
    tensors = [local(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())]
    copies, momenta = snapshot([tensors, optimizer.state_dict()])
    scale = precision.scaler.state_dict()
    try:
        draw_zeros(modules)
        yield
        # It allocates pinned memory for momenta, which checkpoints use again, and for the loss that is read meanwhile.
        snapshot([optimizer.state_dict(), torch.zeros((), dtype=torch.float64, device=tensors[0].device)])
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
        load_momenta(optimizer, momenta)
        precision.scaler.load_state_dict(scale)
