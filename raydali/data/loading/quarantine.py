"""Broken samples: how they are found, and how they are replaced.

    no file, not permitted, empty, no image, cut short, absurdly large  -->  `why_broken`: decoded on the host, or not
    training      the first that is not broken of substitute(seed, epoch, id, 0), (.., 1), ... is read in its place
    validation    left out

What stands in for a broken sample follows from seed, epoch, id and the files alone: it is the same on every rank, at
any number of them, and whenever it is asked for. A file whose bytes changed and that still decodes is not broken.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.loading.read_errors import in_words, may_pass, of_storage, refusal
from raydali.data.sources.retry import Patience, with_retry
from raydali.data.sources.source import Source
from raydali.data.stream.counter_rng import keyed
from raydali.data.stream.stream import MicroBatch
from raydali.data.tasks.pillow import is_certain
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import DataError, StorageAway

SUBSTITUTES_TRIED = 100
_SALT = 0x5AB5717D7E
"""Separates the random numbers of substitutes from those of samples."""
_THREADS = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BrokenSample:
    """A sample that cannot be read.

    Attributes:
        id: in its source.
        path: as the source says.
        reason: what reading it ended with, one line.
        replaced_by: the first that stood in for it, None where there was none yet.
    """

    id: int
    path: str
    reason: str
    replaced_by: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def substitute(seed: int, epoch: int, id: int, attempt: int, samples: int) -> int:
    """Return the id, in 0..samples-1, that is tried in place of a broken one; attempts count from 0."""
    return int(keyed(_SALT, seed, epoch, id, attempt) % np.uint64(samples))


class KnowsBroken(Protocol):
    """Something that has a source's quarantine, such as the quarantine itself."""

    def bound_to(self, source: Source, pipeline: Pipeline[Any]) -> "Quarantine":
        """Return the quarantine, bound to a source and a pipeline that read its samples."""
        ...


class Quarantine:
    """The broken samples of a source that one process knows. Threads may share it.

    Args:
        samples: N of the source.
        seed: key of what stands in for broken samples; None: nothing does, they are left out.
        strict: a broken sample is an error.

    Attributes:
        known: the broken ones by id; that others need not be is all that it says.
        sound: bool (N,), which were suspected, read as a whole, and are not broken.
    """

    def __init__(self, samples: int, *, seed: int | None = None, strict: bool = False) -> None:
        self.samples, self.seed, self.strict = samples, seed, strict
        self.known: dict[int, BrokenSample] = {}
        self.sound = np.zeros(samples, np.bool_)
        self._sound_news: list[int] = []
        self._news: dict[int, BrokenSample] = {}
        self._lock = threading.Lock()
        self._load: Callable[[int], object] = lambda _: None
        self._path: Callable[[int], str] = str
        self._storage = "the storage of the data"

    def bound_to(self, source: Source, pipeline: Pipeline[Any]) -> "Quarantine":
        """Return this quarantine, bound to a source and a pipeline that read its samples."""
        self._load, self._path = partial(_load, source, pipeline), source.path
        self.sound.resize(max(len(self.sound), len(source)), refcheck=False)
        self._storage = str(source) if type(source).__str__ is not object.__str__ else source.path(0)
        return self

    def patience(self) -> Patience:
        """Return the patience for reads of the source that are retried while its storage does not answer."""
        return Patience(self._storage)

    def add(self, broken: Iterable[BrokenSample]) -> None:
        """Add what another process found."""
        with self._lock:
            for sample in broken:
                self.known.setdefault(sample.id, sample)

    def examine(self, ids: Iterable[int] | NDArray[np.int64], *, again: bool = False) -> bool:
        """Read these samples on several threads, and return whether any is broken.

        Args:
            ids: any number, repeated or not.
            again: read those too that were found to be sound before.

        Raises:
            DataError: one is broken, and this is `strict`; or the storage refuses to give it.
            StorageAway: the storage does not answer, for a minute.
        """
        unknown = [id for id in dict.fromkeys(map(int, ids)) if id not in self.known]
        errors = self.refusals(id for id in unknown if again or not self.sound[id])
        self.record(self._described(id, in_words(error)) for id, error in errors.items())
        return bool(errors) or len(unknown) < len(set(map(int, ids)))

    def examine_certain(self, ids: Iterable[int]) -> tuple[bool, dict[int, Exception]]:
        """Read these samples, and record those that no decoder can read.

        Returns:
            Whether any is known as broken; of the others, what those ended with that Pillow alone gave up on, by id.

        Raises:
            DataError, StorageAway: as `examine` does.
        """
        unlike = [*dict.fromkeys(map(int, ids))]
        errors = self.refusals(id for id in unlike if id not in self.known)
        self.record(self._described(id, in_words(error)) for id, error in errors.items() if is_certain(error))
        doubtful = {id: error for id, error in errors.items() if not is_certain(error)}
        return any(id in self.known for id in unlike), doubtful

    def refusals(self, ids: Iterable[int]) -> dict[int, Exception]:
        """Read these samples on several threads, and return the errors by id.

        Raises:
            DataError: the storage refuses to give one.
            StorageAway: the storage does not answer, for a minute.
        """
        asked = [*ids]
        if not asked:
            return {}
        with ThreadPoolExecutor(min(_THREADS, len(asked))) as threads:
            errors = dict(zip(asked, threads.map(self._refusal, asked), strict=True))
        sound = [id for id, error in errors.items() if error is None and not self.sound[id]]
        self.sound[sound] = True
        with self._lock:
            self._sound_news += sound
        return {id: error for id, error in errors.items() if error is not None}

    def _refusal(self, id: int) -> Exception | None:
        return self.read(id, partial(refusal, partial(self._load, id)))

    def read(self, id: int, call: Callable[[], T]) -> T:
        """Return the result of a call that reads a sample; it is retried while the storage does not answer.

        Raises:
            StorageAway: it does not answer, for a minute.
            DataError: the storage refuses.
            Exception: what else the call raises.
        """
        try:
            return with_retry(call, self._storage, worth=may_pass)
        except Exception as error:
            if not of_storage(error):
                raise
            kind = StorageAway if may_pass(error) else DataError
            raise kind(f"the storage did not give sample {id}: {error}") from error

    def mark_broken(self, id: int, reason: str | Exception) -> None:
        """Record a sample that the device's decoder refuses."""
        self.record([self._described(id, in_words(reason) if isinstance(reason, Exception) else reason)])

    def record(self, found: Iterable[BrokenSample]) -> None:
        """Record what this process found.

        Raises:
            DataError: there is any, and this is `strict`.
        """
        with self._lock:
            for sample in found:
                if self.strict:
                    raise DataError(f"sample {sample.id} cannot be read: {sample}")
                self.sound[sample.id] = False
                if sample.id not in self.known:
                    self.known[sample.id] = self._news[sample.id] = sample

    def _described(self, id: int, reason: str) -> BrokenSample:
        path = self._path(id)
        for prefix in (f"sample {id} cannot be read: ", f"cannot read {path}: ", f"{path}: "):
            reason = reason.removeprefix(prefix)
        return BrokenSample(id, path, reason)

    def has_news(self) -> int:
        """The number of samples that were found here since `drain_new`."""
        return len(self._news)

    def drain_new(self) -> list[BrokenSample]:
        """Return the samples that were found here since the last call."""
        with self._lock:
            news, self._news = self._news, {}
        return list(news.values())

    def add_sound(self, ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Add the samples that another process read as a whole and found sound: they are not checked again."""
        self.sound[np.asarray(ids, np.int64)] = True

    def sound_news(self) -> list[int]:
        """Ids of those that were found sound here since the last call."""
        with self._lock:
            news, self._sound_news = self._sound_news, []
        return news

    def with_substitutes(self, micro_batch: MicroBatch) -> MicroBatch:
        """The same with those known as broken replaced, or left out: it may be empty then.

        Raises:
            DataError: nothing is found that could stand in.
        """
        broken = [place for place, id in enumerate(micro_batch.ids.tolist()) if id in self.known] if self.known else []
        if not broken:
            return replace(micro_batch, replaced_by=None) if micro_batch.replaced_by is not None else micro_batch
        if self.seed is None:
            ids, epochs = (np.delete(part, broken) for part in (micro_batch.ids, micro_batch.epochs))
            return replace(micro_batch, ids=ids, epochs=epochs)
        replaced_by = np.full_like(micro_batch.ids, -1)
        for place in broken:
            other = self.substitute_for(int(micro_batch.ids[place]), int(micro_batch.epochs[place]))
            assert other is not None
            replaced_by[place] = other
        return replace(micro_batch, replaced_by=replaced_by)

    def substitute_for(self, id: int, epoch: int) -> int | None:
        """The id to read: this one, if it is not known as broken; else what stands in; None: nothing does.

        Raises:
            DataError: nothing is found that could.
        """
        if id not in self.known:
            return id
        if self.seed is None:
            return None
        for attempt in range(SUBSTITUTES_TRIED):
            other = substitute(self.seed, epoch, id, attempt, self.samples)
            # Not `examine`, which would note it: whether a sample is broken must not depend on whom it stands in for.
            if other not in self.known and (self.sound[other] or not self.refusals([other])):
                self._first_stand_in(id, other)
                return other
        raise DataError(
            f"sample {id} and its {SUBSTITUTES_TRIED} substitutes cannot be read: {self.known[id]}; check whether the "
            f"data were moved"
        )

    def _first_stand_in(self, id: int, other: int) -> None:
        with self._lock:
            for broken in (self.known, self._news):
                if id in broken and broken[id].replaced_by is None:
                    broken[id] = replace(broken[id], replaced_by=other)


def _load(source: Source, pipeline: Pipeline[Any], id: int) -> object:
    return pipeline.sample(source, id, 0)
