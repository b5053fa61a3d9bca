"""Storages that do not answer for a while: the loaders wait, read again, and lose, repeat and condemn nothing."""

import errno
import logging
import os
import re
import time
import urllib.request
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

from raydali.data.broken.quarantine import Quarantine
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.read import reading
from raydali.data.read.reading import OUTAGES, folder_away, retries
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import TrainImages
from raydali.data.video.packets import read_video_info
from raydali.errors import StorageAway
from tests.support.broken import folder
from tests.support.failing_disk import FailingDisk, failing_disk
from tests.support.object_stores import FlakyS3
from tests.support.ranks import run_ranks

SAMPLES = 160
STREAM = Stream(samples=SAMPLES, epochs=1, batch_size=4, global_batch_size=4, seed=3)
FEW = Stream(samples=60, epochs=1, batch_size=4, global_batch_size=4, seed=3)
TRAIN = TrainImages(image_size=16, seed=3)


@pytest.fixture(params=["dali", pytest.param("torch", marks=pytest.mark.slow)])
def name(request: pytest.FixtureRequest) -> LoaderName:
    name: LoaderName = request.param
    return name


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    folder(tmp_path / "data", SAMPLES, {})
    with failing_disk(tmp_path / "data", tmp_path / "seen") as disk:
        yield disk


def ids_of(stream: Stream) -> list[int]:
    return [id for micro_batch in stream.micro_batches(0, 1) for id in micro_batch.ids.tolist()]


@pytest.mark.parametrize("number", [errno.ESTALE, pytest.param(errno.EIO, marks=pytest.mark.slow)])
def test_a_file_server_that_fails_for_a_second(
    disk: FailingDisk, name: LoaderName, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    source, quarantine = LabeledFiles.scan(str(disk.path)), Quarantine(SAMPLES, seed=3)
    OUTAGES.take()
    before, seen, sums = retries(), list[int](), list[torch.Tensor]()
    with make_loader(name, source, TRAIN, STREAM, quarantine=lambda _: quarantine, threads=2) as loader:
        for number_of_batch, batch in enumerate(loader):
            if number_of_batch == 2:
                disk.fail(number, seconds=1)
            seen += batch.ids.tolist()
            sums.append(batch["images"].float().sum())
    assert seen == ids_of(STREAM)
    assert not quarantine.known
    assert retries() > before, "waiting is no progress"
    outages = OUTAGES.take()
    assert outages and {(each.storage, each.reason) for each in outages} <= {
        (str(disk.path), os.strerror(number)),
        (str(disk.path), "fn.io.file.read"),
    }
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all(str(disk.path) in text for text in texts)
    assert len(texts) <= len(outages), "one warning an outage, whichever threads wait"
    # What was read again has the same pixels.
    with make_loader(name, source, TRAIN, STREAM, threads=2) as loader:
        assert torch.equal(torch.stack(sums), torch.stack([batch["images"].float().sum() for batch in loader]))


def test_one_that_stays_away_is_no_sample_s_fault(
    disk: FailingDisk, name: LoaderName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SECONDS", 1.0)
    source, quarantine = LabeledFiles.scan(str(disk.path)), Quarantine(SAMPLES, seed=3)
    with (
        make_loader(name, source, TRAIN, STREAM, quarantine=lambda _: quarantine, threads=2) as loader,
        pytest.raises(StorageAway, match="Stale file handle"),
    ):
        for batch in loader:
            if batch.micro_batch.number == 2:
                disk.fail(errno.ESTALE)
    assert not quarantine.known


def renamed(root: Path) -> None:
    root.rename(root.with_name("away"))


def unmounted(root: Path) -> None:
    """An empty folder in the place of this one, as an unmounted storage leaves it."""
    root.rename(root.with_name("away"))
    root.mkdir()


@pytest.mark.parametrize("take_away", [unmounted, pytest.param(renamed, marks=pytest.mark.slow)])
def test_a_folder_that_is_away_for_a_while_has_no_broken_samples(
    tmp_path: Path, name: LoaderName, take_away: Callable[[Path], object]
) -> None:
    """A sample that is deleted alone is broken."""
    root = tmp_path / "data"
    source, quarantine = folder(root, SAMPLES, {}), Quarantine(SAMPLES, seed=3)
    quarantine.waits_for_folders = True  # as in training
    alone = ids_of(STREAM)[-1]
    OUTAGES.take()
    seen = list[int]()

    def bring_back() -> None:
        if take_away is unmounted:
            root.rmdir()
        root.with_name("away").rename(root)
        Path(source.path(alone)).unlink()

    with make_loader(name, source, TRAIN, STREAM, quarantine=lambda _: quarantine, threads=2) as loader:
        for batch in loader:
            if batch.micro_batch.number == 2:
                take_away(root)
                timer = Timer(2.0, bring_back)
                timer.start()
            seen += batch.ids.tolist()
    timer.join()
    assert seen == ids_of(STREAM)
    assert [*quarantine.known] == [alone] and quarantine.known[alone].replaced_by is not None
    outages = OUTAGES.take()
    assert outages and all(each.storage == str(root) and "is missing" in each.reason for each in outages)


def test_a_folder_that_stays_away_is_named(tmp_path: Path, name: LoaderName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SECONDS", 1.0)
    source, quarantine = folder(tmp_path / "data", SAMPLES, {}), Quarantine(SAMPLES, seed=3)
    quarantine.waits_for_folders = True
    with (
        make_loader(name, source, TRAIN, STREAM, quarantine=lambda _: quarantine, threads=2) as loader,
        pytest.raises(StorageAway, match=re.escape(f"the folder {tmp_path}/data/1 is missing")),
    ):
        for batch in loader:
            if batch.micro_batch.number == 2:
                (tmp_path / "data" / "1").rename(tmp_path / "elsewhere")  # at once, unlike a deletion
    assert not quarantine.known


def test_a_video_in_a_folder_that_is_away(tmp_path: Path) -> None:
    for path, is_away in ((tmp_path / "gone" / "a.mp4", True), (tmp_path / "a.mp4", False)):
        (tmp_path / "other.txt").touch()
        with pytest.raises(OSError, match="cannot be read") as found:
            read_video_info(str(path))
        assert (folder_away(found.value) is not None) is is_away


def test_a_ceiling_is_not_measured_on_a_storage_that_is_away(
    disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SECONDS", 0.5)
    source = LabeledFiles.scan(str(disk.path))
    disk.fail(errno.ETIMEDOUT)
    with make_loader("synthetic", source, TRAIN, STREAM) as loader, pytest.raises(StorageAway):
        next(iter(loader))


def read_while_busy(variables: dict[str, str], name: LoaderName, root: str, seconds: float) -> tuple[Any, ...]:
    """In a process of its own, since DALI keeps its first connection."""
    os.environ.update(variables)
    source, quarantine = LabeledFiles.scan(root), Quarantine(FEW.samples, seed=3)
    seen = []
    with make_loader(name, source, TRAIN, FEW, quarantine=lambda _: quarantine, threads=2) as loader:
        for batch in loader:
            if batch.micro_batch.number == 2:
                urllib.request.urlopen(f"{variables['AWS_ENDPOINT_URL']}/_busy/{seconds}").close()
            seen += batch.ids.tolist()
    return seen, sorted(quarantine.known), OUTAGES.take()


@pytest.mark.parametrize("seconds", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.3, 6, 20))])
def test_an_object_store_that_is_busy(flaky_s3: FlakyS3, tmp_path: Path, name: LoaderName, seconds: float) -> None:
    import boto3

    made, client = folder(tmp_path, FEW.samples, {}), boto3.client("s3")
    for id in range(FEW.samples):
        key = os.path.relpath(made.path(id), tmp_path)
        client.put_object(Bucket="bucket", Key=f"data/{key}", Body=made.read(id))
    seen, known, outages = run_ranks(1, read_while_busy, flaky_s3.variables, name, "s3://bucket/data", seconds)[0]
    assert seen == ids_of(FEW) and not known
    assert flaky_s3.refused, "nothing was asked for meanwhile"
    assert all(each.storage == "s3://bucket/data" for each in outages)
    if seconds == 20:  # the clients of S3 are patient themselves, but not for so long
        assert outages


def test_what_a_fork_repeats_is_its_parent_s_progress() -> None:
    before = retries()

    def repeat() -> None:
        calls = iter([OSError(errno.EIO, "Input/output error"), None])

        def call() -> None:
            if (error := next(calls)) is not None:
                raise error

        reading.with_retry(call, "a disk")

    process = get_context("fork").Process(target=repeat)
    process.start()
    process.join()
    assert process.exitcode == 0 and retries() == before + 1


def test_a_fork_has_outages_of_its_own() -> None:
    """A thread of its parent may hold the lock or wait for the same storage, and the parent tells what ended before."""
    context, outage = get_context("fork"), reading.Outage("the parent's", "Input/output error", 1.0)
    receiver, sender = context.Pipe(duplex=False)

    def repeat() -> None:
        OUTAGES.begin("a disk", "Input/output error")
        OUTAGES.end("a disk")
        sender.send([each.storage for each in OUTAGES.take()])

    OUTAGES.take()
    OUTAGES.add([outage])
    OUTAGES.begin("a disk", "Input/output error")
    process = context.Process(target=repeat)
    try:
        with OUTAGES._lock:
            process.start()
        assert receiver.poll(30) and receiver.recv() == ["a disk"]
        OUTAGES.end("a disk")
        assert OUTAGES.take()[0] == outage
    finally:
        process.kill()
        process.join()


def test_threads_that_wait_for_one_storage_are_in_one_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(reading, "FIRST_PAUSE", 0.05)
    OUTAGES.take()
    back, warnings = time.monotonic() + 0.5, list[str]()

    def call() -> bool:
        if time.monotonic() < back:
            raise OSError(errno.ESTALE, "Stale file handle")
        return True

    with ThreadPoolExecutor(16) as threads:
        answers = threads.map(lambda _: reading.with_retry(call, "/data", warnings.append), range(16))
        assert all(answers)
    assert len(warnings) == 1 and "/data" in warnings[0] and "Stale file handle" in warnings[0]
    (outage,) = OUTAGES.take()
    assert (outage.storage, outage.reason) == ("/data", "Stale file handle") and outage.seconds > 0
