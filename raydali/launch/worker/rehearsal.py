"""The rehearsal of a run: warm-up steps before its first step, and before the first step of another image size.

They train on one batch that stays on the device, to compile, to capture a CUDA graph and to measure the ceiling. Then
they are undone. All sizes are rehearsed before the first step, the last one first: what does not fit into memory fails
then, and nothing is compiled later.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

from torch import nn
from torch.optim import Optimizer

from raydali.data.loading.loader import Batch, Loader
from raydali.data.stream.stream import Stream
from raydali.host import start_clock
from raydali.launch.options import TrainingOptions
from raydali.launch.worker.checkpointing import RunState
from raydali.launch.worker.run_ceiling import RunCeiling
from raydali.launch.worker.session import Session
from raydali.launch.worker.step import Step, StepContext
from raydali.measure.ceiling import Ceiling
from raydali.measure.meter import EpochMeter
from raydali.run.compile_cache import CompileCache
from raydali.run.events import CeilingMeasured, Rehearsed
from raydali.run.messages import Note
from raydali.train.step import ForwardBackward
from raydali.train.warmup import warm_up, warm_up_steps


class Rehearsal:
    """The rehearsal of a run, on one rank. All ranks must call the same methods.

    Args:
        state: the run's state, whose parts the steps change.
        loader: the loader of the training set, whose order is a Stream.
        val_loader: that of the validation set.
        context: what all steps share.
        differentiated: the functions that the steps call, whose CUDA graphs are of one size.
        warm_up_inference: compiles and captures what the validation computes; returns whether there is something to.
        captures: whether steps are captured as a CUDA graph.
    """

    def __init__(
        self,
        session: Session,
        config: TrainingOptions,
        state: RunState,
        loader: Loader,
        val_loader: Loader,
        context: StepContext,
        differentiated: Sequence[ForwardBackward],
        warm_up_inference: Callable[[], bool],
        *,
        captures: bool,
    ) -> None:
        assert isinstance(loader.order, Stream)
        self._session, self._config, self._state, self._stream = session, config, state, loader.order
        self._loader, self._val_loader, self._pipeline = loader, val_loader, loader.pipeline
        self._context, self._differentiated, self._warm_up_inference = context, differentiated, warm_up_inference
        self._epoch = self._stream.epoch_of(session.cursor.start)
        self._ceiling = RunCeiling(
            session,
            state,
            lambda steps, measures: self._warm_up(self._epoch, steps, measures),
        )
        self._cache = CompileCache(session.folder, session.worker, session.warn)
        self._steps = warm_up_steps(differentiated, session.worker.device)
        self._doing: list[str] = []
        if config.compile:
            self._doing.append("compiling")
        if captures:
            self._doing.append("capturing a CUDA graph")
        self._prepares = session.worker.device.type == "cuda" or bool(config.compile)

    def before_first_step(self) -> Iterator[Step]:
        """Yield warm-up steps for all sizes of the epochs that remain.

        A first start also prepares the validation: what does not fit into memory fails then. A resume does so before
        its first validation, and trains again seconds sooner.
        """
        on_gpu, is_first = self._session.worker.device.type == "cuda", not self._state.is_resumed
        if on_gpu:  # on CPUs it would take the cores from the compiler
            self._loader.begin_ahead()
            if is_first:
                self._val_loader.begin_ahead()
        measures = self._config.ceiling and is_first
        if self._config.compile:
            self._cache.load()
        # Before the steps: a capture frees unused pinned memory, and the last steps allocate that of checkpoints.
        if is_first and self._warm_up_inference():
            start_clock.mark("validation")
        later = self._later_epochs() if self._prepares else []
        for epoch in reversed(later):
            if self._session.worker.rank == 0:
                self._session.emit(Note(f"warm-up steps for the image size of epoch {epoch}"))
            yield from self._warm_up(epoch, self._steps, False)
            self._forget()
        if self._prepares or measures:
            yield from self._begin(measures, Rehearsed)
        if self._config.compile:
            self._cache.save()

    def finish(self) -> None:
        """Wait for what is written in the background."""
        self._cache.finish()

    def after_epoch(self, record: Mapping[str, Any]) -> Iterator[Step]:
        """Yield warm-up steps if the next epoch has another size, or if the ceiling cannot be right.

        Args:
            record: the epoch's record.
        """
        done = self._session.cursor.done
        if done == self._stream.steps:
            return
        before, self._epoch = self._stream.epoch_of(done - 1), self._stream.epoch_of(done)
        if self._pipeline.in_epoch(self._epoch) == self._pipeline.in_epoch(before):
            yield from self._ceiling.doubt(record)
            return
        self._state.ceiling = self._state.flops_per_image = None
        self._forget()
        measures = self._config.ceiling
        if self._prepares or measures:
            yield from self._begin(measures, CeilingMeasured)

    def _begin(self, measures: bool, event: type[Rehearsed]) -> Iterator[Step]:
        return self._ceiling.begin(self._steps, measures=measures, what=", ".join(self._doing), event=event)

    def _warm_up(self, epoch: int, steps: int, measures: bool) -> Generator[Step, None, Ceiling]:
        """Yield warm-up steps on images of the epoch's size, and return the ceiling; see `warm_up`."""
        context, worker, size = self._context, self._session.worker, self._config.batch_size
        batch = Batch(self._loader.resident_batch(size, epoch), self._stream.micro_batch(0, worker.rank))
        meter = EpochMeter(worker.device, rank=worker.rank, world_size=worker.world_size, node=worker.node)
        optimizer = self._state.parts["optimizer"]
        assert isinstance(optimizer, Optimizer)
        newest: list[Step] = []
        counts = worker.device.type == "cuda" and epoch == self._epoch
        context.counted_flops = self._counted_flops if counts and self._state.flops_per_image is None else None

        def take() -> Step:
            while newest:
                newest.pop().check_end()
                for each in (self._loader, self._val_loader):
                    each.wait_until_begun()  # it must not disturb what follows the compilation
            newest.append(Step(context, repeat(batch), meter))
            return newest[0]

        measured = yield from warm_up(
            take,
            [part for part in self._state.parts.values() if isinstance(part, nn.Module)],
            optimizer,
            context.precision,
            worker,
            steps=steps,
            images=context.micro_batches * size,
            measures_ceiling=measures,
        )
        return measured

    def _counted_flops(self, flops_per_image: float | None) -> None:
        self._state.flops_per_image = flops_per_image

    def _forget(self) -> None:
        for each in self._differentiated:
            each.expect_other_shapes()

    def _later_epochs(self) -> list[int]:
        """The first epoch of each further size, in order."""
        seen, found = [self._pipeline.in_epoch(self._epoch)], []
        for epoch in range(self._epoch + 1, self._config.epochs):
            pipeline = self._pipeline.in_epoch(epoch)
            if pipeline != seen[-1] and pipeline not in seen:
                seen.append(pipeline)
                found.append(epoch)
        return found
