"""Rehearses a run: warm-up steps before its first step, and before the first step of another image size.

They train on one batch that stays on the device, to compile, to capture a CUDA graph and to measure the ceiling. Then
they are undone. All sizes are rehearsed before the first step, the last one first: what does not fit into memory fails
then, and nothing is compiled later.
"""

from collections.abc import Generator, Iterator, Mapping
from itertools import repeat
from typing import Any

from torch import nn
from torch.optim import Optimizer

from raydali.data.load.loader import Batch, Loader
from raydali.host import start_clock
from raydali.host.hardware import COMPILED_VALIDATION_PAYS_FROM
from raydali.launch.worker.run_ceiling import RunCeiling
from raydali.launch.worker.step import RunParts, Step
from raydali.measure.ceiling import Ceiling
from raydali.measure.meter import EpochMeter
from raydali.run.compile_cache import CompileCache
from raydali.run.events import CeilingMeasured, Rehearsed, SizesRehearsed
from raydali.run.messages import Note
from raydali.training.warmup import warm_up, warm_up_steps


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
        self._ceiling = RunCeiling(
            session, run.state, lambda steps, measures: self._warm_up(self._epoch, steps, measures)
        )
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
        later, ceilings = self._later_epochs() if self._prepares or compares else [], {}
        for epoch in reversed(later):
            run.session.emit_once(Note(f"warm-up steps for the image size of epoch {epoch}"))
            measured = yield from self._warm_up(epoch, self._steps, compares)
            ceilings[epoch] = measured.images_per_second or 0.0
            self._forget()
        yield from self._begin(run.config.ceiling and is_first, Rehearsed)
        ceilings[self._epoch] = run.state.ceiling or 0.0
        if compares and later and all(ceilings.values()):
            run.session.emit_once(SizesRehearsed(costs=self._costs(ceilings)))
        if run.config.compile:
            self.cache.save()

    def after_epoch(self, record: Mapping[str, Any]) -> Iterator[Step]:
        """Yield warm-up steps if the next epoch has another size, or if this record shows that the ceiling is wrong."""
        run, done, pipeline = self._run, self._run.session.cursor.done, self._loader.pipeline
        if done == run.stream.steps:
            return
        before, self._epoch = run.stream.epoch_of(done - 1), run.stream.epoch_of(done)
        if pipeline.in_epoch(self._epoch) == pipeline.in_epoch(before):
            yield from self._ceiling.doubt(record)
            return
        run.state.ceiling = run.state.flops_per_image = run.state.gpu_busy = None
        self._forget()
        yield from self._begin(run.config.ceiling, CeilingMeasured)

    def warm_up_inference(self) -> bool:
        """Compile and capture what the validation computes, once; return whether there was something to."""
        run, compiled = self._run, self._compiles_validation()
        inferences = [*run.inferences] if compiled or run.captures else []
        run.inferences.clear()
        if inferences:
            batch = self._val_loader.resident_batch(min(run.config.batch_size, self._val_loader.order.samples))
            if compiled:
                run.session.emit_once(Note("compiling the validation"))
            for inference, inputs in inferences:
                inference.warm_up(batch[inputs], compiled=compiled, graph=run.captures)
        return bool(inferences)

    def _compiles_validation(self) -> bool:
        config, batch = self._run.config, self._run.config.batch_size * self._run.worker.world_size
        validations = sum(map(config.validates, range(self._epoch, config.epochs)))
        batches = validations * -(-self._val_loader.order.samples // batch)
        return bool(config.compile) and batches >= COMPILED_VALIDATION_PAYS_FROM

    def _begin(self, measures: bool, event: type[Rehearsed]) -> Iterator[Step]:
        if not (self._prepares or measures):
            return
        doing = ["compiling"] if self._run.config.compile else []
        if self._run.captures:
            doing.append("capturing a CUDA graph")
        yield from self._ceiling.begin(self._steps, measures=measures, doing=doing, event=event)

    def _warm_up(self, epoch: int, steps: int, measures: bool) -> Generator[Step, None, Ceiling]:
        """Yield warm-up steps on images of the epoch's size, and return the ceiling; see `warm_up`."""
        run, worker, size = self._run, self._run.worker, self._run.config.batch_size
        batch = Batch(self._loader.resident_batch(size, epoch), run.stream.micro_batch(0, worker.rank))
        meter = EpochMeter(worker.device, rank=worker.rank, world_size=worker.world_size, node=worker.node)
        optimizer = run.state.parts["optimizer"]
        assert isinstance(optimizer, Optimizer)
        newest: list[Step] = []
        run.counts_flops = run.on_gpu and epoch == self._epoch and run.state.flops_per_image is None

        def take() -> Step:
            while newest:
                newest.pop().check_end()
                for loader in (self._loader, self._val_loader):
                    loader.wait_until_begun()  # it must not disturb what follows the compilation
            newest.append(Step(run, repeat(batch), meter))
            return newest[0]

        measured = yield from warm_up(
            take,
            [part for part in run.state.parts.values() if isinstance(part, nn.Module)],
            optimizer,
            run.precision,
            worker,
            differentiated=run.differentiated,
            steps=steps,
            images=run.micro_batches * size,
            measures_ceiling=measures,
        )
        return measured

    def _forget(self) -> None:
        for differentiated in self._run.differentiated:
            differentiated.expect_other_shapes()

    def _costs(self, ceilings: Mapping[int, float]) -> list[float]:
        """See `SizesRehearsed`; `ceilings` has the ceiling of each size by the first epoch of that size."""
        in_epoch = self._loader.pipeline.in_epoch

        def ceiling(epoch: int) -> float:
            return next(rate for first, rate in ceilings.items() if in_epoch(first) == in_epoch(epoch))

        return [ceilings[self._epoch] / ceiling(epoch) for epoch in range(self._run.config.epochs)]

    def _later_epochs(self) -> list[int]:
        """The first epoch of each further size, in order."""
        pipeline = self._loader.pipeline
        seen, epochs = [pipeline.in_epoch(self._epoch)], []
        for epoch in range(self._epoch + 1, self._run.config.epochs):
            of_epoch = pipeline.in_epoch(epoch)
            if of_epoch != seen[-1] and of_epoch not in seen:
                seen.append(of_epoch)
                epochs.append(epoch)
        return epochs
