"""Merges, reports, limits and saves the broken samples that the ranks of a run find.

Each rank finds and replaces broken samples independently (data/broken/quarantine.py). At intervals the ranks merge
their findings. Only the merged result is compared with the limit, so all ranks stop at the same step.
"""

import hashlib
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raydali.data.broken.quarantine import BrokenSample, Quarantine
from raydali.data.index.source import Source
from raydali.data.load.loader import Loader, left_in_flight
from raydali.data.read.reading import OUTAGES, Outage, causes
from raydali.data.stream.stream import Order, OrderedPass
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import DataError, NodeError
from raydali.launch.worker.session import Session
from raydali.options.every_job import TrainingOptions
from raydali.run.events import Quarantined, StorageRetried
from raydali.run.folder import EVENTS
from raydali.text import plural, summarize
from raydali.training.worker import BROKEN, Worker

EXCHANGE_STEPS = 16
"""Interval at which ranks merge new findings, if any rank has some."""
SHOWN = 20
TRAINING, VALIDATION = "training", "validation"
CHECKED_AHEAD = 8
"""Number of samples that every node reads before the first step."""
SOUND = "sound"
"""The key in checkpoints of a bit array that marks the samples that were read completely and are sound."""


class BrokenSamples:
    """The broken samples, on one rank. All ranks must call the same methods in the same order.

    Args:
        options: the job's options.
        samples: number of training samples.
    """

    def __init__(self, options: TrainingOptions, session: Session, *, samples: int) -> None:
        self._options, self._session = options, session
        run = hashlib.sha256(str(session.folder).encode()).hexdigest()[:16]
        self._notes = Path(tempfile.gettempdir(), f"raydali-in-flight-{os.getuid()}", run)
        self._suspects: dict[str, set[int]] = defaultdict(set)
        self._quarantines = {TRAINING: self._new_quarantine(TRAINING, samples, options.seed)}
        self._agreed: dict[str, dict[int, BrokenSample]] = defaultdict(dict, {TRAINING: {}})
        self._sources: dict[str, list[Source]] = {TRAINING: [], VALIDATION: []}
        self._reported: set[tuple[str, int]] = set()

    def of(self, order: Order) -> "_OfOrder":
        """Return the factory of the quarantine for a loader of this order.

        Broken samples of a stream are replaced; an ordered pass skips them.
        """
        return _OfOrder(lambda source: self._quarantine(order, source))

    def _quarantine(self, order: Order, source: Source) -> Quarantine:
        """Return the quarantine of a source: "training", "validation", "validation 2", and so on."""
        kind, seed = (VALIDATION, None) if isinstance(order, OrderedPass) else (TRAINING, self._options.seed)
        sources = self._sources[kind]
        if not any(_is_same(other, source) for other in sources):
            sources.append(source)
        index = [_is_same(other, source) for other in sources].index(True)
        name = f"{kind} {index + 1}" if index else kind
        if name not in self._quarantines:
            self._quarantines[name] = self._new_quarantine(name, order.samples, seed)
            self._quarantines[name].add(self._agreed[name].values())
        return self._quarantines[name]

    def _new_quarantine(self, name: str, samples: int, seed: int | None) -> Quarantine:
        made = Quarantine(samples, seed=seed)
        made.waits_for_folders = True
        made.noted_in, made.in_flight_at_death = self._notes / name, self._suspects[name]
        return made

    def share_suspects(self) -> None:
        """Exchange what crashed processes of this run had in flight on any node.

        Such samples are tried in a child process before they are decoded: their decoder may have crashed the process.
        """
        mine = {name: sorted(ids) for name, ids in left_in_flight(self._notes).items()}
        for of_rank in self._session.worker.exchange(mine):
            for name, ids in of_rank.items():
                self._suspects[name].update(ids)

    def finish(self) -> None:
        """Remove the notes of this run on this node, since it is complete."""
        shutil.rmtree(self._notes, ignore_errors=True)

    def resume(self, saved: dict[str, Any]) -> None:
        """Restore the broken samples of a checkpoint, before loaders are made. No recorded event is repeated."""
        if SOUND in saved:
            self._quarantines[TRAINING].add_sound(np.flatnonzero(np.unpackbits(saved[SOUND].numpy())))
        for name, samples in saved.items():
            if name == SOUND:
                continue
            self._agreed[name].update((sample["id"], BrokenSample(**sample)) for sample in samples)
        self._quarantines[TRAINING].add(self._agreed[TRAINING].values())
        if self._session.worker.rank == 0:
            rows = self._session.folder.rows(EVENTS)
            self._reported = {(row["of"], row["id"]) for row in rows if row["event"] == "quarantine"}
            for name, agreed in self._agreed.items():
                for sample in agreed.values():
                    self._report(name, sample)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        It has the broken training samples, on which the choice of substitutes depends, and the bits of sound samples.
        """
        kept = {name: self._agreed[name] for name in [*self._agreed] if name.startswith(TRAINING)}
        sound = self._quarantines[TRAINING].sound
        return {
            **{name: [asdict(sample) for _, sample in sorted(samples.items())] for name, samples in kept.items()},
            **({SOUND: torch.from_numpy(np.packbits(sound))} if sound.any() else {}),
        }

    def after_step(self, steps: int) -> None:
        """Merge new findings at intervals, if any rank has some.

        Args:
            steps: number of completed steps.

        Raises:
            DataError: see `exchange`.
        """
        worker = self._session.worker
        news = sum(len(quarantine.news) for quarantine in self._quarantines.values()) + len(OUTAGES)
        worker.counts.mine[BROKEN] = news
        may_crash = any(self._suspects.values())  # on all ranks
        is_due = worker.counts.sums[BROKEN] and (may_crash or not steps % EXCHANGE_STEPS)
        if is_due or (worker.world_size == 1 and news):
            self.exchange()

    def exchange(self) -> None:
        """Merge the findings of all ranks.

        Raises:
            DataError: more samples are broken than `max_bad_fraction` allows; on all ranks.
        """
        news = {name: [*map(asdict, quarantine.drain_new())] for name, quarantine in self._quarantines.items()}
        sound = {name: quarantine.sound_news() for name, quarantine in self._quarantines.items()}
        exchanged = self._session.worker.exchange((news, sound, [*map(asdict, OUTAGES.take())]))
        self._report_outages([[Outage(**row) for row in outages] for _, _, outages in exchanged])
        for _, sound, _ in exchanged:
            for name, ids in sound.items():
                if name in self._quarantines:
                    self._quarantines[name].add_sound(ids)
        for of_rank, _, _ in exchanged:
            for name, samples in of_rank.items():
                for sample in (BrokenSample(**row) for row in samples):
                    if self._agreed[name].setdefault(sample.id, sample) is sample:
                        self._report(name, sample)
        for name, quarantine in self._quarantines.items():
            quarantine.add(self._agreed[name].values())
        for name, quarantine in self._quarantines.items():
            self._limit(name, quarantine.samples)

    def in_validation(self) -> int:
        """Return the number of broken validation samples that the last exchange found."""
        return sum(len(samples) for name, samples in self._agreed.items() if name.startswith(VALIDATION))

    def _report_outages(self, of_ranks: list[list[Outage]]) -> None:
        """Report one event for each storage, with the ranks that waited for it."""
        if self._session.worker.rank:
            return
        every = [(rank, outage) for rank, outages in enumerate(of_ranks) for outage in outages]
        for storage in dict.fromkeys(outage.storage for _, outage in every):
            ranks = sorted({rank for rank, outage in every if outage.storage == storage})
            longest = max((outage for _, outage in every if outage.storage == storage), key=lambda wait: wait.seconds)
            waited = StorageRetried(path=storage, reason=longest.reason, waited_seconds=longest.seconds, ranks=ranks)
            self._session.emit(waited)

    def _report(self, name: str, sample: BrokenSample) -> None:
        if self._session.worker.rank == 0 and (name, sample.id) not in self._reported:
            self._reported.add((name, sample.id))
            self._session.emit(Quarantined(of=name, **asdict(sample)))

    def _limit(self, name: str, samples: int) -> None:
        broken, share = self._agreed[name], self._options.max_bad_fraction
        most = allowed(share, samples)
        if len(broken) <= most:
            return
        shown = summarize((sample for _, sample in sorted(broken.items())), SHOWN, separator="\n  ")
        raise DataError(
            f"broken {name} samples:\n  {shown}\n"
            f"{len(broken)} of {samples} {name} samples are broken, but --max-bad-fraction {share:g} allows {most}: "
            f"raise it, or --exclude the FILE of `raydali verify -o FILE`"
        )


def _is_same(one: Source, other: Source) -> bool:
    """Return whether two sources are the same: sources with equal names may be in different folders."""
    if one is other:
        return True
    return len(one) == len(other) and one.path(0) == other.path(0) and one.fingerprint == other.fingerprint


@dataclass(frozen=True)
class _OfOrder:
    """The factory of quarantines for loaders of one order."""

    of_source: Callable[[Source], Quarantine]

    def bound_to(self, source: Source, pipeline: Pipeline[Any]) -> Quarantine:
        """Return the quarantine of this source, which reads samples with the pipeline."""
        return self.of_source(source).bound_to(source, pipeline)


def allowed(share: float, samples: int) -> int:
    """Return how many samples may be broken: the share rounded down, but at least 1; 0 if the share is 0."""
    return max(1, int(share * samples)) if share else 0


def check_samples(loader: Loader, worker: Worker) -> None:
    """Read the same few samples on every rank if ranks run on several nodes. All ranks must call it.

    If a disk is not mounted on one node, all samples that this node reads would otherwise be recorded as broken.

    Raises:
        NodeError: most of them are missing on this rank's node, and another node has most of them.
    """
    if len(set(worker.exchange(worker.node))) == 1:
        return
    asked = min(CHECKED_AHEAD, len(loader.source))
    ids = [len(loader.source) * (2 * place + 1) // (2 * asked) for place in range(asked)]
    with ThreadPoolExecutor(asked) as threads:
        missing = [id for id, gone in zip(ids, threads.map(partial(_is_missing, loader), ids), strict=True) if gone]
    most = [2 * count > asked for count in worker.exchange(len(missing))]
    if 2 * len(missing) > asked and not all(most):
        raise NodeError(
            f"node {worker.node} lacks {len(missing)} of {plural(asked, 'sample')} that other nodes have, such as "
            f"{loader.source.path(missing[0])}: mount or copy the data there"
        )


def _is_missing(loader: Loader, id: int) -> bool:
    """Return whether the sample's file does not exist. Other errors are ignored: the loader will meet them again."""
    try:
        loader.pipeline.sample(loader.source, id, 0)
    except Exception as error:
        return any(isinstance(cause, FileNotFoundError) for cause in causes(error))
    return False
