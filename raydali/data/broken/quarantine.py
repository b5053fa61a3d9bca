"""Broken samples: how they are found, and how they are replaced.

    no file, not permitted, empty, no image, cut short, absurdly large, a damaged mask, boxes of another size, ...
    training      the first that is not broken of substitute(seed, epoch, id, 0), (.., 1), ... is read in its place
    validation    left out

A loader makes its batches by `Quarantine.load`, in which samples are found broken and are replaced.

The substitute of a broken sample depends on seed, epoch, id and the files alone: it is the same on every rank, with
any number of ranks, at any time. A file whose bytes changed and that still decodes is not broken.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.decode.pillow import apart
from raydali.data.index.source import Source
from raydali.data.read.reading import (
    STORAGE_ERRNOS,
    Backoff,
    FolderAwayError,
    causes,
    folder_away,
    is_transient,
    with_retry,
)
from raydali.data.read.storage import StoreError
from raydali.data.stream.counter_rng import keyed
from raydali.data.stream.stream import MicroBatch, joined
from raydali.data.tasks.pipeline import Pipeline, SampleErrors
from raydali.errors import DataError, StorageAway

SUBSTITUTES_TRIED = 100
REMEDY = "raydali verify lists all broken samples"
_SALT = 0x5AB5717D7E
"""Separates the random numbers of substitutes from the random numbers of samples."""
_THREADS = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BrokenSample:
    """A sample that cannot be read.

    Attributes:
        id: in its source.
        path: of the sample in its source.
        reason: the error of reading it, on one line.
        replaced_by: its first substitute; None before there is one.
    """

    id: int
    path: str
    reason: str
    replaced_by: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def none_read(broken: Iterable[object]) -> DataError:
    """Return the error of a pass that could read no sample; it names the first of those that are known to be broken."""
    first = "".join(f", such as {sample}" for sample in islice(broken, 1))
    return DataError(f"none of the samples can be read{first}; {REMEDY}")


def substitute(seed: int, epoch: int, id: int, attempt: int, samples: int) -> int:
    """Return the id, in 0..samples-1, that is tried in place of a broken one; attempts count from 0."""
    return int(keyed(_SALT, seed, epoch, id, attempt) % np.uint64(samples))


class KnowsBroken(Protocol):
    """An object that has a source's quarantine, such as the quarantine itself."""

    def bound_to(self, source: Source, pipeline: Pipeline[Any]) -> "Quarantine":
        """Return the quarantine, bound to a source and a pipeline that read its samples."""
        ...


class Quarantine:
    """The broken samples of a source that one process knows. Threads may share it.

    What reads samples waits while the storage does not answer. After a minute it raises StorageAway, and a DataError if
    the storage refuses to give them.

    Args:
        samples: N of the source.
        seed: key of the substitutes of broken samples; None: these are left out.
        strict: a broken sample is an error.

    Attributes:
        known: samples found broken so far, by id. Others have not necessarily been checked.
        news: those that were found here since `drain_new`.
        sound: bool (N,), samples that were suspicious, were read as a whole, and are not broken.
        for_pillow: samples with files that DALI refuses, and Pillow decodes.
        in_flight_at_death: samples that a process was decoding when it was killed: their decoder may be the cause.
        waits_for_folders: whether files that are missing together with their folder are storage that is away.
        storage: the name of the source's storage in messages.
        noted_in: the beginning of the path of the file in which a loader notes what it has in flight (loader.py).
    """

    def __init__(self, samples: int, *, seed: int | None = None, strict: bool = False) -> None:
        self.samples, self.seed, self.strict = samples, seed, strict
        self.known: dict[int, BrokenSample] = {}
        self.sound = np.zeros(samples, np.bool_)
        self.for_pillow: set[int] = set()
        self.in_flight_at_death: set[int] = set()
        self.noted_in: Path | None = None
        self.waits_for_folders = False
        self._sound_news: list[int] = []
        self.news: dict[int, BrokenSample] = {}
        self._lock = threading.Lock()
        self._load: Callable[[int], object] = lambda _: None
        self._path: Callable[[int], str] = str
        self.storage = "the storage of the data"

    def bound_to(self, source: Source, pipeline: Pipeline[Any]) -> "Quarantine":
        """Return this quarantine, bound to a source and a pipeline that read its samples."""
        self._load, self._path = lambda id: pipeline.sample(source, id, 0), source.path
        self.sound.resize(max(len(self.sound), len(source)), refcheck=False)
        self.storage = str(source) if type(source).__str__ is not object.__str__ else source.path(0)
        return self

    def add(self, broken: Iterable[BrokenSample]) -> None:
        """Add what another process found."""
        with self._lock:
            for sample in broken:
                self.known.setdefault(sample.id, sample)

    def examine(self, ids: Iterable[int] | NDArray[np.int64], *, again: bool = False) -> bool:
        """Read these samples on several threads, and return whether any is broken.

        Args:
            ids: any number, repeated or not.
            again: also read samples that were found sound before.

        Raises:
            DataError: one is broken, and this is `strict`.
        """
        unknown = [id for id in dict.fromkeys(map(int, ids)) if id not in self.known]
        errors = self.refusals(id for id in unknown if again or not self.sound[id])
        self.record(self._described(id, describe_error(error)) for id, error in errors.items())
        return bool(errors) or len(unknown) < len(set(map(int, ids)))

    def refusals(self, ids: Iterable[int]) -> dict[int, Exception]:
        """Read these samples on several threads, and return the errors by id."""

        def error_of(id: int) -> Exception | None:
            with apart(id in self.in_flight_at_death):
                return self.read(id, partial(refusal, partial(self._noticing, partial(self._load, id))))

        asked = [*ids]
        if not asked:
            return {}
        with ThreadPoolExecutor(min(_THREADS, len(asked))) as threads:
            errors = dict(zip(asked, threads.map(error_of, asked), strict=True))
        sound = [id for id, error in errors.items() if error is None and not self.sound[id]]
        self.sound[sound] = True
        with self._lock:
            self._sound_news += sound
        return {id: error for id, error in errors.items() if error is not None}

    def read(self, id: int, call: Callable[[], T]) -> T:
        """Return the result of a call that reads a sample; raises the errors of the call that are not the storage's."""
        try:
            return with_retry(partial(self._noticing, call), self.storage, worth=may_pass)
        except Exception as error:
            if not of_storage(error):
                raise
            raise self._not_given(id, error) from error

    def load(self, micro_batch: MicroBatch, make: Callable[[MicroBatch], T]) -> tuple[MicroBatch, T | None]:
        """Return a micro-batch in which broken samples are replaced, or left out, and the result of `make` for it.

        Samples that `make` finds broken are recorded, and it is called again without them; also after a pause if the
        storage does not answer.

        Args:
            micro_batch: as the order gives it, or as this has returned it.
            make: takes a micro-batch; it raises SampleErrors, or any other error, whose sample is then searched for.

        Returns:
            None in place of the result if all samples are left out.

        Raises:
            DataError: a sample is broken, and this is `strict`; no substitute is found; the storage refuses a sample.
            StorageAway: the storage does not answer, for a minute.
            Exception: an error of `make` that no sample causes.
        """
        backoff: Backoff | None = None
        try:
            while True:
                settled = self.with_substitutes(micro_batch) if self.known else micro_batch
                if not len(settled.ids):
                    return settled, None
                try:
                    return settled, make(settled)
                except MemoryError:
                    raise
                except SampleErrors as failed:
                    backoff = backoff or Backoff(self.storage)
                    ids = settled.read_ids.tolist()
                    errors = {ids[place]: self._noticed(error) for place, error in failed.errors.items()}
                    broken = {id: error for id, error in errors.items() if not of_storage(error)}
                    self.record(self._described(id, describe_error(error)) for id, error in broken.items())
                    if not broken:
                        id, error = next(iter(errors.items()))
                        if not may_pass(error) or not backoff.pause(error):
                            raise self._not_given(id, error) from error
                except Exception as error:
                    if self.examine(settled.read_ids, again=True):
                        continue
                    if not isinstance(error, OSError):
                        raise
                    backoff = backoff or Backoff(self.storage)
                    if not backoff.pause(error):
                        raise unreadable(str(error), error) from error
        finally:
            if backoff is not None:
                backoff.end()

    def _noticing(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            if (noticed := self._noticed(error)) is error:
                raise
            raise noticed from None

    def _noticed(self, error: Exception) -> Exception:
        """Return an error; of a file that is missing with its folder, an error of the storage, if asked for."""
        away = folder_away(error) if self.waits_for_folders else None
        return error if away is None else FolderAwayError(f"the folder {away} is missing: mount or restore it")

    def _not_given(self, id: int, error: Exception) -> DataError | StorageAway:
        return unreadable(f"the storage did not give sample {id}, {self._path(id)}: {error}", error)

    def mark_broken(self, id: int, reason: str | Exception) -> None:
        """Record a sample that the device's decoder refuses."""
        self.record([self._described(id, describe_error(reason) if isinstance(reason, Exception) else reason)])

    def record(self, samples: Iterable[BrokenSample]) -> None:
        """Record samples that this process found broken.

        Raises:
            DataError: there is any, and this is `strict`.
        """
        with self._lock:
            for sample in samples:
                if self.strict:
                    raise DataError(f"sample {sample.id} cannot be read: {sample}; {REMEDY}")
                self.sound[sample.id] = False
                if sample.id not in self.known:
                    self.known[sample.id] = self.news[sample.id] = sample

    def _described(self, id: int, reason: str) -> BrokenSample:
        path = self._path(id)
        for prefix in (f"sample {id} cannot be read: ", f"cannot read {path}: ", f"{path}: "):
            reason = reason.removeprefix(prefix)
        return BrokenSample(id, path, reason)

    def drain_new(self) -> list[BrokenSample]:
        """Return the samples that were found here since the last call."""
        with self._lock:
            news, self.news = self.news, {}
        return list(news.values())

    def add_sound(self, ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Add the samples that another process read as a whole and found sound: they are not checked again."""
        self.sound[np.asarray(ids, np.int64)] = True

    def sound_news(self) -> list[int]:
        """Ids of the samples that were found sound here since the last call."""
        with self._lock:
            news, self._sound_news = self._sound_news, []
        return news

    def with_substitutes(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with samples known as broken replaced, or left out: it may be empty then.

        Raises:
            DataError: no substitute is found.
        """
        if micro_batch.parts:
            return joined([*map(self.with_substitutes, micro_batch.parts)])
        broken = [place for place, id in enumerate(micro_batch.ids.tolist()) if id in self.known]
        if not broken:
            return replace(micro_batch, replaced_by=None) if micro_batch.replaced_by is not None else micro_batch
        if self.seed is None:
            ids, epochs = (np.delete(part, broken) for part in (micro_batch.ids, micro_batch.epochs))
            return replace(micro_batch, ids=ids, epochs=epochs)
        replaced_by = np.full_like(micro_batch.ids, -1)
        for place in broken:
            other = self.substitute_for(int(micro_batch.ids[place]), int(micro_batch.draw_keys[place]))
            assert other is not None
            replaced_by[place] = other
        return replace(micro_batch, replaced_by=replaced_by)

    def substitute_for(self, id: int, epoch: int) -> int | None:
        """The id to read: this one, or its substitute if it is known as broken; None if it has none.

        Args:
            id: of the sample.
            epoch: the key of its draws, so that each repeat has a substitute of its own.

        Raises:
            DataError: no substitute is found.
        """
        if id not in self.known:
            return id
        if self.seed is None:
            return None
        for attempt in range(SUBSTITUTES_TRIED):
            other = substitute(self.seed, epoch, id, attempt, self.samples)
            if id in self.in_flight_at_death:
                self.in_flight_at_death.add(other)
            # Not `examine`, which would record it: whether a sample is broken must not depend on which one it replaces.
            if other not in self.known and (self.sound[other] or not self.refusals([other])):
                with self._lock:
                    for broken in (self.known, self.news):
                        if id in broken and broken[id].replaced_by is None:
                            broken[id] = replace(broken[id], replaced_by=other)
                return other
        raise DataError(
            f"sample {id} and its {SUBSTITUTES_TRIED} substitutes cannot be read: {self.known[id]}; {REMEDY}"
        )


def why_broken(load: Callable[[], object]) -> str | None:
    """Return why a sample cannot be read, on one line; None if it can. See `refusal` for arguments and errors."""
    error = refusal(load)
    return None if error is None else describe_error(error)


def refusal(load: Callable[[], object]) -> Exception | None:
    """Return the error of reading a sample; None if it can be read.

    Args:
        load: reads and decodes all of it on the host, as `Pipeline.sample` does.

    Raises:
        OSError, DataError, MemoryError: the storage did not answer; the sample is not to blame.
    """
    try:
        load()
    except MemoryError:
        raise
    except Exception as error:
        if of_storage(error):
            raise
        return error
    return None


def describe_error(error: Exception) -> str:
    """Return an error on one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def of_storage(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is the storage's."""
    errors = [cause for cause in causes(error) if isinstance(cause, OSError)]
    return any(isinstance(cause, StoreError | FolderAwayError) or cause.errno in STORAGE_ERRNOS for cause in errors)


def may_pass(error: BaseException) -> bool:
    """Return whether an error of reading a sample is the storage's and may be transient."""
    return of_storage(error) and is_transient(error)


def unreadable(text: str, error: BaseException) -> DataError | StorageAway:
    """Return the error with this text of a sample that could not be read because of another error."""
    return StorageAway(text) if may_pass(error) else DataError(text)
