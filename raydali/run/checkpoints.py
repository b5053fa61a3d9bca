"""The checkpoints of a run: saved in the background, valid once complete, verified before use.

    checkpoint_000000100/state.pt         written first
    checkpoint_000000100/manifest.json    written last: sizes and hashes; without it the checkpoint is incomplete
    checkpoint_000000095/refused.json     the manifest of an unusable checkpoint, renamed when an older one was used

A kill at any time leaves the newest complete checkpoint intact. A failed save is reported as an event.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raydali.data.read.reading import with_retry
from raydali.data.read.storage import reason
from raydali.errors import StorageAway, StorageError, SupersededError
from raydali.run.events import CheckpointFailed, CheckpointRefused, Event, FirstCheckpoint
from raydali.run.find import MANIFEST, REFUSED, lost_checkpoint, name_of, newest_first, step_of
from raydali.run.folder import RunFolder
from raydali.run.model_file import BestWeights
from raydali.training import checkpoint_file
from raydali.training.checkpoint_file import FILE_NAME, BadCheckpointError
from raydali.training.worker import Worker

KEPT = 3
"""Number of the newest checkpoints to keep; older ones are deleted."""
MOST_PROTECTED = 3
"""Number of the first bad steps whose checkpoints are kept, see `CheckpointStore.protect`."""
MAX_FAILURES, MAX_SECONDS = 5, 600.0
"""The run ends after this number of consecutive failed saves if they also took this time."""


@dataclass(frozen=True)
class _Unsaved:
    step: int
    state: dict[str, Any]
    best: BestWeights | None
    is_blocked: bool
    before_writing: Callable[[], None]


class CheckpointStore:
    """The checkpoints in a run's folder. Only rank 0 writes, on a background thread.

    Args:
        folder: the run's folder.
        worker: this worker, whose process group broadcasts the state that rank 0 reads.
        emit: sends an event to the driver.
        is_kept: returns whether the checkpoint of a step is kept permanently.

    Attributes:
        error: the error that has ended the background thread, which `wait` raises; None if there is none.
    """

    def __init__(
        self,
        folder: RunFolder,
        worker: Worker,
        emit: Callable[[Event], None],
        is_kept: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._folder, self._worker, self._emit, self._is_kept = folder, worker, emit, is_kept
        self._thread: threading.Thread | None = None
        self._unsaved: _Unsaved | None = None
        self._why, self._failures, self._failing_since = "", 0, 0.0
        self._is_first = True
        self._protected: set[int] = set()
        self.error: BaseException | None = None

    # -- Saving

    def protect(self, step: int) -> None:
        """Keep the checkpoint of a step permanently, since a bad step follows; if it is one of the first such ones."""
        if step and len(self._protected) < MOST_PROTECTED:
            self._protected.add(step)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        best: BestWeights | None = None,
        save_error: str = "",
        before_writing: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to save a state. Only rank 0 may call it.

        It first waits until the previous state is saved, so that at most two are in memory.

        Args:
            step: number of global batches that the checkpoint covers.
            state: a snapshot; it must not change after `before_writing`.
            best: weights to save in `best/`; if this fails, they are saved with the next checkpoint.
            save_error: why the rows before the checkpoint could not be written; then it counts as a failed one.
            before_writing: called on the background thread before each attempt to write. After an OSError the
                checkpoint counts as a failed one; other errors are the store's `error`.

        Raises:
            StorageError: MAX_FAILURES consecutive checkpoints could not be saved for MAX_SECONDS.
            StorageAway: the same, because the storage does not answer.
        """
        self.wait()
        seconds = time.monotonic() - self._failing_since
        if self._failures >= MAX_FAILURES and seconds >= MAX_SECONDS:
            raise self._error(f"{self._failures} checkpoints in a row could not be written, for {seconds:.0f} s,")
        if best is None and self._unsaved is not None:
            best = self._unsaved.best
        self._unsaved = _Unsaved(step, state, best, bool(save_error), before_writing)
        if save_error:
            self._failed(save_error)
        else:
            self._thread = threading.Thread(target=self._save, args=(self._unsaved,), daemon=True, name="checkpoint")
            self._thread.start()

    def wait(self) -> None:
        """Wait until the background thread has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Wait until the last checkpoint is saved; a failure is retried for a minute.

        Raises:
            StorageError: the checkpoint cannot be saved.
            StorageAway: the same, because the storage does not answer.
        """
        self.wait()
        if (unsaved := self._unsaved) is None:
            return
        if unsaved.is_blocked:
            raise self._error("the last checkpoint could not be written")
        try:
            with_retry(
                lambda: self._write(unsaved),
                str(self._folder),
                self._folder.warn,
                lambda error: isinstance(error, OSError),
            )
        except OSError as error:
            self._why = reason(error)
            raise self._error("the last checkpoint could not be written") from error

    def _save(self, unsaved: _Unsaved) -> None:
        try:
            self._write(unsaved)
        except OSError as error:
            # Partial files must not fill a full disk. Nothing is retried, since the storage may not answer.
            with suppress(OSError, SupersededError):
                self._folder.fence()
                self._folder.filesystem.delete_dir(self._folder.path(name_of(unsaved.step)))
            self._failed(reason(error))
        except BaseException as error:
            self.error = error

    def _write(self, unsaved: _Unsaved) -> None:
        name = name_of(unsaved.step)
        unsaved.before_writing()
        if unsaved.best is not None:
            unsaved.best.write(self._folder)
        contents = checkpoint_file.serialize(unsaved.state)
        self._folder.write(f"{name}/{FILE_NAME}", contents)
        world_size = self._worker.world_size
        manifest = checkpoint_file.manifest({FILE_NAME: contents}, step=unsaved.step, world_size=world_size)
        self._folder.write(f"{name}/{MANIFEST}", manifest)
        self._unsaved, self._failures = None, 0
        if self._is_first:
            self._emit(FirstCheckpoint(step=unsaved.step))
            self._is_first = False
        self._tidy(unsaved.step)

    def _failed(self, why: str) -> None:
        assert self._unsaved is not None
        if not self._failures:
            self._failing_since = time.monotonic()
        self._why, self._failures = why, self._failures + 1
        step, path = self._unsaved.step, f"{self._folder}/{name_of(self._unsaved.step)}"
        self._emit(CheckpointFailed(step=step, path=path, reason=why, in_a_row=self._failures))

    def _tidy(self, step: int) -> None:
        """Delete old checkpoints, and incomplete ones that killed processes have left."""
        try:
            complete = 0
            for name in newest_first(self._folder):
                if self._folder.exists(f"{name}/{MANIFEST}"):
                    complete += 1
                    kept = self._is_kept(step_of(name)) or step_of(name) in self._protected
                    if complete <= KEPT or kept:
                        continue
                    self._folder.remove(f"{name}/{MANIFEST}")  # first, so that the rest counts as incomplete
                elif step_of(name) > step:
                    continue
                self._folder.remove_folder(name)
        except OSError as error:
            self._folder.warn(f"old checkpoints in {self._folder} cannot be deleted: {reason(error)}")

    def _error(self, what: str) -> StorageAway | StorageError:
        kind = StorageAway if self._folder.is_transient(OSError(self._why)) else StorageError
        return kind(
            f"{what} to {self._folder}: {self._why}: repair the storage; the same command then resumes from the "
            "newest checkpoint"
        )

    # -- Loading

    def newest(self) -> dict[str, Any] | None:
        """Return the state of the newest usable checkpoint, the same on every rank; None if there was never one.

        All ranks must call it. Rank 0 reads the checkpoint, reports unusable ones, and renames their manifests.

        Raises:
            StorageError: there were checkpoints, but none can be used, or the storage refuses access.
            StorageAway: the storage does not answer.
        """
        self.wait()
        state, error, away = None, "", False
        if self._worker.rank == 0:
            try:
                state = self._choose()
            except StorageError as failure:
                error = str(failure)
            except OSError as failure:
                error = f"the checkpoints in {self._folder} cannot be read: {reason(failure)}"
                away = self._folder.is_transient(failure)
        error, away = self._worker.from_first((error, away))
        if error:
            raise StorageAway(error) if away else StorageError(error)
        shared: dict[str, Any] | None = self._worker.state_from_first(state)
        return shared

    def _choose(self) -> dict[str, Any] | None:
        refused: list[str] = []
        last = ""
        for name in newest_first(self._folder):
            if not self._folder.exists(f"{name}/{MANIFEST}"):
                continue
            try:
                state = self._read(name)
            except BadCheckpointError as error:
                refused.append(name)
                last = str(error)
                self._emit(CheckpointRefused(path=f"{self._folder}/{name}", reason=last))
                continue
            # If they become readable again, they will not match what the run writes from now on.
            for bad in refused:
                self._folder.rename(f"{bad}/{MANIFEST}", f"{bad}/{REFUSED}")
            self._is_first = False
            return state
        if refused:
            raise StorageError(
                f"no checkpoint in {self._folder} can be used ({', '.join(refused)}; {last}): "
                "restore one, or give another --name"
            )
        if why := lost_checkpoint(self._folder):
            raise StorageError(f"{self._folder} cannot go on: {why}: restore one, or give another --name")
        return None

    def _read(self, name: str) -> dict[str, Any]:
        def contents(file: str) -> bytes:
            try:
                return self._folder.read(f"{name}/{file}")
            except FileNotFoundError as error:
                raise BadCheckpointError(f"{file} is missing") from error

        return checkpoint_file.load_verified(contents(MANIFEST), contents, step=step_of(name))
