"""The run's folder: whole files, rows that outlive a crash, storage that cannot be used."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydali.data.index.labeled import LabeledFiles
from raydali.errors import StorageAway, UsageError
from raydali.run.find import find_run
from raydali.run.folder import FORM, RunFolder
from tests.support.disks import small_disk
from tests.support.messages import mentioning

ROWS: list[dict[str, Any]] = [{"step": 1, "text": 'a "line"\nand a ü'}, {"step": 2, "loss": 0.1}, {"step": 3}]
ROOT = Path(__file__).parents[2]


def test_files_come_back_as_written(folder: RunFolder) -> None:
    assert not folder.exists("config.json")
    folder.write_json("config.json", {"seed": 1 << 60, "rate": 0.1, "name": "ü"})
    folder.write("deep/down/file.bin", bytes(range(256)))
    assert folder.exists("config.json") and folder.exists("deep/down/file.bin") and folder.exists("deep")
    assert folder.read_json("config.json") == {"seed": 1 << 60, "rate": 0.1, "name": "ü"}
    assert folder.read("deep/down/file.bin") == bytes(range(256))
    folder.write("deep/down/file.bin", b"shorter")
    assert folder.read("deep/down/file.bin") == b"shorter"


def test_only_an_empty_folder_is_removed(folder: RunFolder) -> None:
    folder.create()
    folder.write("config.json", b"{}")
    folder.remove_if_empty()
    assert folder.read("config.json") == b"{}"
    folder.filesystem.delete_file(folder.path("config.json"))
    folder.remove_if_empty()
    folder.remove_if_empty()
    assert not Path(folder.path()).exists()


def test_files_of_a_folder_are_sorted_and_leave_folders_out(folder: RunFolder) -> None:
    assert folder.files("samples") == []
    for name in ("samples/b", "samples/a", "samples/deeper/c", "samples-2/d"):
        folder.write(name, b"")
    assert folder.files("samples") == ["a", "b"]


def test_rows_are_appended_one_a_line(folder: RunFolder) -> None:
    assert folder.rows("epochs.jsonl") == []
    for number, row in enumerate(ROWS, 1):
        folder.append("epochs.jsonl", row)
        assert folder.rows("epochs.jsonl") == ROWS[:number]
    lines = folder.read("epochs.jsonl").decode().splitlines()
    assert [json.loads(line) for line in lines] == ROWS


def test_rows_to_be_written_again_are_dropped(folder: RunFolder) -> None:
    folder.keep_rows("epochs.jsonl", lambda row: True)
    assert not folder.exists("epochs.jsonl")
    for row in ROWS:
        folder.append("epochs.jsonl", row)
    folder.keep_rows("epochs.jsonl", lambda row: row["step"] <= 2)
    assert folder.rows("epochs.jsonl") == ROWS[:2]
    folder.append("epochs.jsonl", ROWS[2])
    assert folder.rows("epochs.jsonl") == ROWS
    folder.keep_rows("epochs.jsonl", lambda row: False)
    assert folder.rows("epochs.jsonl") == []


def test_a_truncated_last_line_is_skipped_and_spares_the_next(folder: RunFolder) -> None:
    whole = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[:2])
    first = whole.index(b"\n") + 1
    for length in (1, first - 2, first - 1, first, first + 1, len(whole) - 2, len(whole) - 1):
        folder.write("events.jsonl", whole[:length])
        # A row that lacks nothing but its newline is whole.
        read = ROWS[: (length >= first - 1) + (length >= len(whole) - 1)]
        assert folder.rows("events.jsonl") == read
        folder.append("events.jsonl", ROWS[2])
        assert folder.rows("events.jsonl") == [*read, ROWS[2]]


@pytest.mark.parametrize("rest", [b"\0\0\0\0", b"\xff\xfe{", b'{"step": "\xc3'], ids=repr)
def test_what_a_lost_write_leaves_at_the_end_is_left_out(folder: RunFolder, rest: bytes) -> None:
    folder.write("events.jsonl", b'{"step": 1}\n' + rest)
    assert folder.rows("events.jsonl") == [{"step": 1}]


@pytest.mark.parametrize("broken", [b'{"step": 2', b"", b"\0\0\0\0", b"\xff"], ids=repr)
def test_a_broken_line_before_the_last_is_an_error(folder: RunFolder, broken: bytes) -> None:
    contents = b'{"step": 1}\n' + broken + b'\n{"step": 3}\n'
    folder.write("events.jsonl", contents)
    calls: tuple[Callable[[], object], ...] = (
        lambda: folder.rows("events.jsonl"),
        lambda: folder.keep_rows("events.jsonl", lambda row: False),
    )
    for call in calls:
        with pytest.raises(UsageError, match=mentioning(f"{folder}/events.jsonl 2")):
            call()
    assert folder.read("events.jsonl") == contents


def test_a_broken_last_line_that_was_ended_is_an_error(folder: RunFolder) -> None:
    folder.write("events.jsonl", b'{"step": 1}\n{"st\n')
    with pytest.raises(UsageError, match="line 2 is broken"):
        folder.rows("events.jsonl")


WRITE_FOR_EVER = """
import itertools, sys
from raydali.run.folder import RunFolder
folder = RunFolder(sys.argv[1], "run")
folder.create()
for number in itertools.count():
    folder.write("file", bytes([number % 251]) * 3_000_000)
"""


def test_readers_see_whole_files_during_writes_and_after_a_kill(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)], cwd=ROOT)
        try:
            while not folder.exists("file"):
                assert writer.poll() is None
                time.sleep(0.01)
            here = set[int]()
            while len(here) < 4:
                contents = folder.read("file")
                assert contents == contents[:1] * 3_000_000
                here.add(contents[0])
        finally:
            writer.kill()
            writer.wait()
        contents = folder.read("file")
        assert contents == contents[:1] * 3_000_000


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    folder.write("file", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write("file", b"new")
    assert folder.read("file") == b"old"
    assert folder.files("") == ["file"]


def test_a_row_refused_by_a_full_disk_leaves_no_part(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=256) as disk:
        folder = RunFolder(str(disk.path), "run")
        folder.create()
        folder.append("epochs.jsonl", ROWS[0])
        disk.fill(leave=8000)
        before = folder.read("epochs.jsonl")
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                folder.append("epochs.jsonl", {"text": "x" * 50_000})
            assert folder.read("epochs.jsonl") == before
        disk.clear()
        folder.append("epochs.jsonl", ROWS[1])
        assert folder.rows("epochs.jsonl") == ROWS[:2]


def test_nothing_is_written_where_the_run_s_folder_is_gone(tmp_path: Path) -> None:
    """As where a disk was unmounted: it would lie on another."""
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    folder.append("epochs.jsonl", ROWS[0])
    shutil.rmtree(folder.path())
    gone = f"folder of the run is gone: '{tmp_path}/run'"
    with pytest.raises(FileNotFoundError, match=gone):
        folder.write("deep/file", b"")
    with pytest.raises(FileNotFoundError, match=gone):
        folder.append("epochs.jsonl", ROWS[0])
    assert list(tmp_path.iterdir()) == []


def test_files_are_renamed_and_removed(folder: RunFolder) -> None:
    folder.write("deep/old", b"1")
    folder.write("deep/other", b"2")
    folder.rename("deep/old", "deep/new")
    assert folder.files("deep") == ["new", "other"] and folder.read("deep/new") == b"1"
    folder.remove("deep/other")
    assert folder.files("deep") == ["new"]
    folder.write("config.json", b"{}")
    folder.remove_folder("deep")
    assert not folder.exists("deep/new") and folder.exists("config.json")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\n", "a b", "-a", ".a", "a?b", "a#b", "a%2fb", "a\0"])
def test_names_that_cannot_name_a_folder_everywhere_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=mentioning("name folder letters")):
        RunFolder("/tmp", name)


@pytest.mark.parametrize("name", ["a", "imagenet-20260101-120000", "a.b_c-d", "2", "_x", "größe"])
def test_other_names_are_folders(tmp_path: Path, name: str) -> None:
    folder = RunFolder(str(tmp_path), name)
    folder.create()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert folder.files("") == []


def test_storage_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for storage in (f"{tmp_path}/file", f"{tmp_path}/file/below", "/proc/raydali", "/dev/null"):
        with pytest.raises(UsageError, match=mentioning(f"--storage {storage}")):
            RunFolder(storage, "run").create()
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_folder_that_exists_but_takes_no_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.create()

    def read_only(self: RunFolder, file: str, _: bytes) -> None:
        raise OSError(30, "Read-only file system", self.path(file))

    monkeypatch.setattr(RunFolder, "write", read_only)
    with pytest.raises(UsageError, match="Read-only file system"):
        folder.create()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_folder_of_another_user_is_named_with_its_owner() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        storage = Path(temporary)
        storage.chmod(0o755)
        for name, mode in (("open", 0o755), ("closed", 0o700)):
            (storage / name).mkdir(mode)
            (storage / name / "config.json").write_text(f'{{"form": {FORM}}}')
        calls: list[tuple[str, Callable[[], object]]] = [
            (f"--storage {storage} {storage}/open belongs", RunFolder(temporary, "open").create),
            (f"--storage {storage} {storage} belongs", RunFolder(temporary, "new").create),
            (f"{storage}/closed belongs", lambda: find_run(f"{storage}/closed")),
            (f"{storage}/closed belongs", lambda: LabeledFiles.scan(f"{storage}/closed")),
        ]
        os.seteuid(65534)
        try:
            for named, call in calls:
                with pytest.raises(UsageError, match=mentioning(f"{named} 0 (root) 65534")):
                    call()
        finally:
            os.seteuid(0)


@pytest.mark.usefixtures("s3")
def test_storage_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(UsageError, match=mentioning("--storage s3://no-such-bucket/runs")):
        RunFolder("s3://no-such-bucket/runs", "run").create()
    for storage in ("ftp://host/runs", "s3://a b/c", "s3:///runs", "s3://bucket/runs?nonsense=1"):
        with pytest.raises(UsageError, match=mentioning(f"--storage {storage.split()[0]}")):
            RunFolder(storage, "run").create()


def test_a_folder_means_the_same_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    pickles = [
        pickle.dumps(RunFolder(storage, "run")) for storage in ("~/runs", "runs", "../home/runs/", f"{home}/runs")
    ]
    monkeypatch.setenv("HOME", str(elsewhere))
    monkeypatch.chdir(elsewhere)
    for each in pickles:
        folder = pickle.loads(each)
        assert folder.uri_of_storage == f"{home}/runs"
        assert str(folder) == folder.path() == f"{home}/runs/run"
        assert folder.path("a/b") == f"{home}/runs/run/a/b"


def test_a_folder_in_use_can_be_passed_on(folder: RunFolder) -> None:
    folder.append("events.jsonl", ROWS[0])
    assert pickle.loads(pickle.dumps(folder)).rows("events.jsonl") == ROWS[:1]


@pytest.mark.usefixtures("s3")
def test_names_of_a_folder_in_s3() -> None:
    for storage in ("s3://bucket/runs", "s3://bucket/runs/"):
        folder = RunFolder(storage, "run")
        assert str(folder) == "s3://bucket/runs/run"
        assert folder.path("epochs.jsonl") == "bucket/runs/run/epochs.jsonl"
    assert RunFolder("s3://bucket", "run").path() == "bucket/run"


def test_a_row_is_added_to_a_long_local_file_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    folder.append("epochs.jsonl", ROWS[0])
    monkeypatch.setattr(RunFolder, "read", lambda *_: pytest.fail("it was read"))
    folder.append("epochs.jsonl", ROWS[1])
    monkeypatch.undo()
    assert folder.rows("epochs.jsonl") == ROWS[:2]


def test_an_s3_that_is_away_while_it_is_located_is_no_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pyarrow asks AWS for a bucket's region, in each new process and for each copy of the folder."""
    said = "When resolving region for bucket 'runs': AWS Error NETWORK_CONNECTION during HeadBucket operation"

    def from_uri(_: str) -> None:
        raise OSError(said)

    monkeypatch.setattr("raydali.run.folder.arrow_fs.FileSystem", SimpleNamespace(from_uri=from_uri))
    folder = RunFolder("s3://runs", "r")
    with pytest.raises(StorageAway, match="does not answer"), folder.must_answer():
        _ = folder.filesystem
    said = "When getting information for bucket 'runs': AWS Error ACCESS_DENIED"
    with pytest.raises(UsageError, match=mentioning("--storage s3://runs credentials")), folder.must_answer():
        _ = folder.filesystem
