"""The checkpoints of a run: saved in the background, valid once complete, verified before use.

    checkpoint_000000100/state.pt         written first
    checkpoint_000000100/part_00001.pt    of a sharded run: the shards of rank 1, which it writes itself
    checkpoint_000000100/manifest.json    written last: sizes and hashes; without it the checkpoint is incomplete
    checkpoint_000000095/refused.json     the manifest of an unusable checkpoint, renamed when an older one was used

A kill at any time leaves the newest complete checkpoint intact. A failed save is reported as an event.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from raydali.data.read.reading import with_retry
from raydali.data.read.storage import reason
from raydali.errors import StorageAway, StorageError, SupersededError
from raydali.run.events import CheckpointFailed, CheckpointRefused, Event, FirstCheckpoint
from raydali.run.find import KEPT, MANIFEST, REFUSED, complete_ones, lost_checkpoint, name_of, newest_first, step_of
from raydali.run.folder import RunFolder
from raydali.run.model_file import BestWeights
from raydali.training import checkpoint_file
from raydali.training.checkpoint_file import FILE_NAME, BadCheckpointError
from raydali.training.checkpoint_parts import assembled
from raydali.training.worker import Worker

if TYPE_CHECKING:
    from raydali.training.sharding import Sharding

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
    rows: Sequence[torch.Tensor]


class CheckpointStore:
    """The checkpoints in a run's folder. Only rank 0 writes, on a background thread; of a sharded run, all ranks.

    Args:
        folder: the run's folder.
        worker: this worker, whose process group broadcasts the state that rank 0 reads.
        emit: sends an event to the driver.
        is_kept: returns whether the checkpoint of a step is kept permanently.

    Attributes:
        error: the error that has ended the background thread, which `wait` raises; None if there is none.
        sharding: what shards the run, which says by what group its threads agree; None: it is not sharded.
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
        self.sharding: Sharding | None = None

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
        rows: Sequence[torch.Tensor] = (),
    ) -> None:
        """Begin to save a state. Only rank 0 may call it; of a sharded run, all ranks must, with their rows.

        It first waits until the previous state is saved, so that at most two are in memory.

        Args:
            step: number of global batches that the checkpoint covers.
            state: a snapshot; it must not change after `before_writing`.
            best: weights to save in `best/`; if this fails, they are saved with the next checkpoint.
            save_error: why the rows before the checkpoint could not be written; then it counts as a failed one.
            before_writing: called on the background thread before each attempt to write. After an OSError the
                checkpoint counts as a failed one; other errors are the store's `error`.
            rows: a snapshot of this rank's rows of sharded tensors, see `checkpoint_parts.split`.

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
        self._unsaved = _Unsaved(step, state, best, bool(save_error), before_writing, rows)
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
        if self.sharding is not None:
            self.sharding.beside.exchange(None)  # until rank 0 has deleted what failed
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
                if self._worker.rank == 0:
                    self._folder.filesystem.delete_dir(self._folder.path(name_of(unsaved.step)))
            self._failed(reason(error))
        except BaseException as error:
            self.error = error

    def _write(self, unsaved: _Unsaved) -> None:
        self._together(unsaved.before_writing)  # no file before all have found their rows finite
        files = self._together(lambda: self._write_files(unsaved))
        self._together(lambda: self._write_manifest(unsaved, files))
        self._unsaved, self._failures = None, 0

    def _together(self, write: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Let each rank that saves write; return what their functions return, together. All fail if one does.

        Raises:
            OSError: another rank failed.
        """
        if self.sharding is None:
            return write() or {}
        written, error = dict[str, Any](), None
        try:
            written = write() or {}
        except Exception as failure:
            error = failure
        ranks = self.sharding.beside.exchange((written, None if error is None else reason(error)))
        if error is not None:
            raise error
        for rank, (_, why) in enumerate(ranks):
            if why is not None:
                raise OSError(f"rank {rank}: {why}")
        return {file: facts for written, _ in ranks for file, facts in written.items()}

    def _write_files(self, unsaved: _Unsaved) -> dict[str, Any]:
        """Write the files of this rank, but for the manifest; return what that says of them."""
        files: dict[str, Any] = {}
        if self._worker.rank == 0:
            if unsaved.best is not None:
                unsaved.best.write(self._folder)
            files[FILE_NAME] = unsaved.state
        if self.sharding is not None and self.sharding.writes:
            files[f"part_{self._worker.rank:05d}.pt"] = unsaved.rows
        for file, state in files.items():
            contents = checkpoint_file.serialize(state)
            self._folder.write(f"{name_of(unsaved.step)}/{file}", contents)
            files[file] = checkpoint_file.described(contents)
        return files

    def _write_manifest(self, unsaved: _Unsaved, files: dict[str, Any]) -> None:
        if self._worker.rank == 0:
            contents = checkpoint_file.manifest(files, step=unsaved.step, world_size=self._worker.world_size)
            self._folder.write(f"{name_of(unsaved.step)}/{MANIFEST}", contents)
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
        if self._worker.rank == 0:
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

        All ranks must call it. Rank 0 reads the checkpoint, reports unusable ones, and renames their manifests. In a
        sharded run, each rank reads its rows of sharded tensors.

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
        return shared if shared is None or self.sharding is None else self._with_rows(shared, self.sharding)

    def _choose(self) -> dict[str, Any] | None:
        refused: list[str] = []
        last = ""
        for name in complete_ones(self._folder):
            try:
                state = read_checkpoint(self._folder, name, whole=self.sharding is None)
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

    def _with_rows(self, checkpoint: dict[str, Any], sharding: "Sharding") -> dict[str, Any]:
        name = checkpoint["name"]
        try:
            with self._folder.must_answer():
                return assembled(checkpoint, partial(_contents, self._folder, name), sharding.rank, sharding.shards)
        except (BadCheckpointError, OSError) as error:
            raise StorageError(
                f"{self._folder}/{name} cannot be used ({reason(error)}): delete it to resume from the one before"
            ) from error


def read_checkpoint(folder: RunFolder, name: str, *, whole: bool = True) -> dict[str, Any]:
    """Return the state of a checkpoint, and the "sha256" of its manifest.

    A sharded one that is not read `whole` has marks, and its "name".

    Raises:
        BadCheckpointError: it cannot be used.
    """
    read = partial(_contents, folder, name)
    manifest = read(MANIFEST)
    checkpoint = checkpoint_file.load_verified(manifest, read, step=step_of(name))
    checkpoint |= {"sha256": checkpoint_file.described(manifest)["sha256"]}
    if whole:
        return assembled(checkpoint, read)
    sizes = {info.base_name: info.size for info in folder.infos(name)}
    for file, facts in checkpoint["parts"].items():
        if sizes.get(file) != facts["bytes"]:
            raise BadCheckpointError(f"{file} is missing, or has not {facts['bytes']} bytes")
    return {**checkpoint, "name": name}


def _contents(folder: RunFolder, name: str, file: str) -> bytes:
    try:
        return folder.read(f"{name}/{file}")
    except FileNotFoundError as error:
        raise BadCheckpointError(f"{file} is missing") from error
