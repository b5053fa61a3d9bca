"""The ceiling of a run, which is measured before the first step, and again if it cannot be right.

The node of rank 0 keeps it, so that the next command under the same conditions does not measure it (KeptCeiling).
"""

import hashlib
import inspect
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raydali.host.facts import versions
from raydali.launch.options import PLACEMENT_OPTIONS, TrainingOptions
from raydali.launch.worker.checkpointing import RunState
from raydali.launch.worker.session import Session
from raydali.launch.worker.step import Step
from raydali.measure.ceiling import Ceiling, share_of_ceiling
from raydali.measure.kept_ceiling import Kept, KeptCeiling
from raydali.run.events import CeilingMeasured, Rehearsed
from raydali.run.messages import Note
from raydali.text import rate_text
from raydali.train.worker import Worker

OPTIONS_WITHOUT_STEP_COST = PLACEMENT_OPTIONS | {
    "name",
    "checkpoint_every",
    "trace_samples",
    "loader",
    "ceiling",
    "shuffle_window",
    "shuffle_apart",
    "repeats",
    "exclude",
    "max_bad_fraction",
    "val_data",
    "root",
}
"""Options that do not change the duration of a step if its batch is already on the device."""

OF_OTHER_COMMANDS = {"seed", "epochs", "learning_rate"}
"""Options in which a later command may differ and still has the same ceiling; the size of its images is known apart."""

MAX_MEASURED_AGAIN = 3
"""Maximum number of repeated measurements per worker group: other processes may always keep the machine busy."""


def ceiling_conditions(config: TrainingOptions, worker: Worker) -> dict[str, str]:
    """Return the options, workers and device that a ceiling depends on. Under other conditions it is invalid."""
    options = {name: repr(value) for name, value in asdict(config).items() if name not in OPTIONS_WITHOUT_STEP_COST}
    device = worker.device
    threads = f"{torch.get_num_threads()} threads of a CPU"
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    return options | {"world_size": str(worker.world_size), "on": on}


def code_of(model: nn.Module, functions: Iterable[Callable[..., Any]]) -> str:
    """Return a hash of the files that define the forward passes of a model's modules, and these functions."""
    files = set[str]()
    for each in (*{type(module).forward for module in model.modules()}, *functions):
        with suppress(TypeError, OSError):
            files.add(inspect.getsourcefile(each) or "")
    found = [Path(file).read_bytes() for file in sorted(files) if Path(file).is_file()]
    return hashlib.sha256(b"".join(found)).hexdigest()


class RunCeiling:
    """The measurement of a run's ceiling, on one rank. All ranks must call the same methods.

    The measured ceiling is stored in the RunState.

    Args:
        warm_up: yields a number of warm-up steps, then measures the ceiling if requested, and undoes all these steps.
        conditions: what the ceiling depends on, as text, besides versions and hosts.
    """

    def __init__(
        self,
        session: Session,
        state: RunState,
        warm_up: Callable[[int, bool], Generator[Step, None, Ceiling]],
        conditions: Mapping[str, str],
    ) -> None:
        self._session, self._state, self._warm_up, self._conditions = session, state, warm_up, conditions
        self._kept: KeptCeiling | None = None
        self._is_void = False
        self._measured_again = 0

    def begin(
        self,
        steps: int,
        *,
        measures: bool,
        known: Kept | None,
        what: str,
        event: type[Rehearsed] = Rehearsed,
    ) -> Iterator[Step]:
        """Yield the warm-up steps before the first step, or the first one of another size, and report their purpose.

        Args:
            steps: number of steps before the measurement.
            measures: whether the ceiling is measured, unless it is known.
            known: see `find`.
            what: other purposes of the warm-up steps; may be empty.
            event: the event that reports their end.
        """
        if known is not None:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(known.time))
            self._note(f"the ceiling is kept from {when}, with the same options on the same hosts")
        measures = measures and known is None
        doing = [what] * bool(what) + ["measuring the ceiling (--no-ceiling leaves it out)"] * measures
        self._note(f"warm-up steps on one batch: {', '.join(doing) or 'tuning'}")
        began = time.perf_counter()
        measured = yield from self._warm_up(steps, measures)
        rate, measured_at = known[:2] if known else (measured.images_per_second, None)
        self._state.ceiling = rate or self._state.ceiling
        if measures:
            self._keep(rate)
        self._is_void, self._measured_again = measured.void, 0
        if measured.void:
            self._note(f"the ceiling is void: {measured.why}; it is measured again after the epoch")
        elif measured.why:
            self._note(f"the ceiling is not measured: {measured.why}")
        self._report(event, rate, began, measured_at)

    def doubt(self, record: Mapping[str, Any]) -> Iterator[Step]:
        """Measure again if the machine was busy in the last measurement, or if the epoch was faster than the ceiling.

        It yields the steps of the measurement. Their time belongs to no epoch.

        Args:
            record: the epoch's record.
        """
        known = self._state.ceiling
        is_wrong, measures = self._session.worker.from_first(self._judge(record, known))
        if is_wrong:
            self._state.ceiling = None
            self._keep(None)
            if known is not None and not self._is_void:
                slower = "the epoch was faster, so the machine was busy when the ceiling was measured"
                self._note(f"the ceiling of {rate_text(known)} images/s is void: {slower}. It will be measured again")
            self._is_void = True
        if measures:
            self._measured_again += 1
            began = time.perf_counter()
            self._state.ceiling = (yield from self._warm_up(1, True)).images_per_second
            self._keep(self._state.ceiling)
            self._report(CeilingMeasured, self._state.ceiling, began)

    def _judge(self, record: Mapping[str, Any], known: float | None) -> tuple[bool, bool]:
        """Return whether the ceiling is wrong, and whether it is to be measured again; rank 0 decides."""
        is_wrong = known is not None and _disproves(record, known)
        is_void = is_wrong or (known is None and self._is_void)
        return is_wrong, is_void and self._measured_again < MAX_MEASURED_AGAIN

    def find(self, inputs: str) -> Kept | None:
        """Return the ceiling that the node of rank 0 has kept. All ranks must call it.

        Args:
            inputs: describes the images, which the ceiling depends on.
        """
        worker, cache = self._session.worker, self._session.node_cache
        hosts = worker.exchange([socket.gethostname(), self._conditions.get("on")])
        found: Kept | None = None
        if worker.rank == 0 and cache is not None:
            options = {name: value for name, value in self._conditions.items() if name not in OF_OTHER_COMMANDS}
            self._kept = KeptCeiling.of(cache, {**options, **versions(), "inputs": inputs, "hosts": hosts})
            found = self._kept.read()
        of_first = worker.from_first(found)
        return None if of_first is None else Kept(*of_first)

    def _keep(self, rate: float | None) -> None:
        if self._kept is not None:
            self._kept.write(rate, self._state.flops_per_image) if rate else self._kept.forget()

    def _note(self, text: str) -> None:
        if self._session.worker.rank == 0:
            self._session.emit(Note(text))

    def _report(
        self, event: type[Rehearsed], ceiling: float | None, began: float, measured_at: float | None = None
    ) -> None:
        if self._session.worker.rank == 0:
            seconds = round(time.perf_counter() - began, 3)
            at = round(measured_at, 3) if measured_at else None
            self._session.emit(
                event(ceiling_images_per_second=ceiling, rehearsal_seconds=seconds, ceiling_measured_at=at)
            )


def _disproves(record: Mapping[str, Any], ceiling: float) -> bool:
    """Return whether an epoch was faster than the ceiling allows; False if the number of ranks changed during it."""
    if len({rank["world_size"] for rank in record["ranks"]}) > 1:
        return False
    rate = record["images_per_second"]
    return bool(rate) and share_of_ceiling(rate, ceiling) is None
