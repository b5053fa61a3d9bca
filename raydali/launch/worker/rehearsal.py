"""The rehearsal of a run: warm-up steps before its first step, and before the first step of another image size.

They train on one batch that stays on the device, to compile, to capture a CUDA graph and to measure the ceiling. Then
they are undone. All sizes are rehearsed before the first step, the last one first: what does not fit into memory fails
then, and nothing is compiled later.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from raydali.data.loading.loader import Loader
from raydali.data.stream.stream import Stream
from raydali.launch.options import TrainingOptions
from raydali.launch.worker.checkpointing import RunState
from raydali.launch.worker.run_ceiling import RunCeiling
from raydali.launch.worker.session import Session
from raydali.launch.worker.step import Step
from raydali.measure.ceiling import Ceiling
from raydali.run.events import CeilingMeasured, Rehearsed
from raydali.run.messages import Note
from raydali.train.step import ForwardBackward
from raydali.train.warmup import warm_up_steps

WarmUp = Callable[[int, int, bool], Generator[Step, None, Ceiling]]
"""Yields warm-up steps: an epoch, whose image size they have; their number; whether the ceiling is measured after."""


class Rehearsal:
    """The rehearsal of a run, on one rank. All ranks must call the same methods.

    Args:
        loader: the loader of the training set, whose order is a Stream.
        warm_up: yields the warm-up steps, and undoes them.
        differentiated: the functions that the steps call, whose CUDA graphs are of one size.
        captures: whether steps are captured as a CUDA graph.
    """

    def __init__(
        self,
        session: Session,
        config: TrainingOptions,
        state: RunState,
        loader: Loader,
        warm_up: WarmUp,
        differentiated: Sequence[ForwardBackward],
        *,
        captures: bool,
    ) -> None:
        assert isinstance(loader.order, Stream)
        self._session, self._config, self._state, self._stream = session, config, state, loader.order
        self._pipeline, self._warm_up, self._differentiated = loader.pipeline, warm_up, differentiated
        self._epoch = self._stream.epoch_of(session.cursor.start)
        self._ceiling = RunCeiling(session, state, lambda steps, measures: warm_up(self._epoch, steps, measures))
        self._steps = warm_up_steps(session.worker.device)
        self._doing = ["compiling"] * bool(config.compile) + ["capturing a CUDA graph"] * captures
        self._prepares = session.worker.device.type == "cuda" or bool(config.compile)

    def before_first_step(self) -> Iterator[Step]:
        """Yield warm-up steps for all sizes of the epochs that remain."""
        later = self._later_epochs() if self._prepares else []
        for epoch in reversed(later):
            if self._session.worker.rank == 0:
                self._session.emit(Note(f"warm-up steps for the image size of epoch {epoch}"))
            yield from self._warm_up(epoch, self._steps, False)
            self._forget()
        measures = self._config.ceiling and not self._state.is_resumed
        if self._prepares or measures:
            yield from self._begin(measures, Rehearsed)

    def after_epoch(self, record: Mapping[str, Any] | None) -> Iterator[Step]:
        """Yield warm-up steps if the next epoch has another size, or if the ceiling cannot be right.

        Args:
            record: the epoch's record on rank 0; None on other ranks.
        """
        done = self._session.cursor.done
        if done == self._stream.steps:
            return
        before, self._epoch = self._epoch, self._stream.epoch_of(done)
        if self._pipeline.in_epoch(self._epoch) == self._pipeline.in_epoch(before):
            yield from self._ceiling.doubt(record)
            return
        self._state.ceiling = None
        self._forget()
        if self._prepares or self._config.ceiling:
            yield from self._begin(self._config.ceiling, CeilingMeasured)

    def _begin(self, measures: bool, event: type[Rehearsed]) -> Iterator[Step]:
        return self._ceiling.begin(self._steps, measures=measures, what=", ".join(self._doing), event=event)

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
