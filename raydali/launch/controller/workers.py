"""The processes of a worker group, as Ray Train's controller starts and ends them: neither takes for ever."""

import logging
from threading import Timer
from typing import Any

import ray
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group import Worker, WorkerGroup
from ray.util.placement_group import PlacementGroup, remove_placement_group

_log = logging.getLogger(__name__)


class Workers(WorkerGroup):
    """A worker group that frees its resources at once when it has failed, also while it starts: Ray would keep them.

    Attributes:
        start_timeout: seconds from its placement to the start of the training function, for which Ray would wait
            without end; 0: no limit. One for all groups, which are those of one run.
    """

    start_timeout = 0.0
    _limit: Timer | None = None
    _is_late = False

    def _start(self) -> None:
        try:
            super()._start()  # type: ignore[no-untyped-call]  # of Ray
        except Exception as error:
            if self.has_started():  # otherwise Ray has done so
                self.end()
            if self._is_late:
                late = f"a worker was not ready within {self.start_timeout:g} s (--start-timeout)"
                raise WorkerGroupStartupFailedError(late) from error
            raise
        finally:
            if self._limit is not None:
                self._limit.cancel()

    def _create_workers(
        self, num_workers: int, placement_group: PlacementGroup, *args: Any, **options: Any
    ) -> list[Worker]:
        if self.start_timeout:
            self._limit = Timer(self.start_timeout, self._give_up, (placement_group,))
            self._limit.daemon = True
            self._limit.start()
        return super()._create_workers(num_workers, placement_group, *args, **options)

    def _give_up(self, placement_group: PlacementGroup) -> None:
        """End all processes, so that who waits for one of them hears of its death."""
        self._is_late = True
        remove_placement_group(placement_group)

    def end(self) -> None:
        """End the processes, for which Ray would wait 5 s if one of them cannot answer, and free the resources."""
        for end in (self._kill, self.shutdown):
            try:
                end()
            except Exception:  # its node may be gone; the remaining workers end with their placement group
                _log.exception("a worker group that failed could not be shut down")

    def _kill(self) -> None:
        for worker in self.get_workers():
            ray.kill(worker.actor)
