"""Indexing shards in a bucket: what is read of them, and where the index is kept for the next run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pytest

from jobs.imagenet import DIGITS, Config
from raydali.data.index.cache import RUNS_CACHE, cache_with_runs
from raydali.data.index.tar import TarShards
from raydali.data.index.tfrecord import TFRecords
from raydali.launch.driver.command import parse
from tests.support.object_stores import FlakyS3
from tests.support.tars import packed, samples
from tests.support.tfrecords import tfrecords

SAMPLES = 60


@pytest.fixture(autouse=True)
def storage() -> Iterator[None]:
    yield
    cache_with_runs(None)


def _members(size: int) -> dict[str, bytes]:
    """Images of some random size, each behind its label."""
    sizes = np.random.default_rng(0).integers(size // 2, size * 2, SAMPLES).tolist()
    return {
        f"{i:04}.{kind}": data
        for i in range(SAMPLES)
        for kind, data in (("cls", b"%d" % (i % 7)), ("jpg", bytes(sizes[i])))
    }


@pytest.mark.usefixtures("tar_cache")
def test_of_large_members_the_headers_are_read(flaky_s3: FlakyS3, tmp_path: Path) -> None:
    shard = packed(_members(160_000))
    boto3.client("s3").put_object(Bucket="bucket", Key="train/0.tar", Body=shard)
    calls, sent = flaky_s3.calls, flaky_s3.sent
    remote = TarShards.scan("s3://bucket/train/0.tar")
    assert flaky_s3.sent - sent < len(shard) / 15
    assert flaky_s3.calls - calls < 1.2 * SAMPLES
    (tmp_path / "0.tar").write_bytes(shard)
    local = TarShards.scan(str(tmp_path / "0.tar"))
    assert np.array_equal(remote.offsets, local.offsets) and remote.fingerprint == local.fingerprint


@pytest.mark.usefixtures("tar_cache")
def test_small_members_are_read_over(flaky_s3: FlakyS3) -> None:
    boto3.client("s3").put_object(Bucket="bucket", Key="train/0.tar", Body=packed(_members(20_000)))
    calls = flaky_s3.calls
    assert len(TarShards.scan("s3://bucket/train/0.tar")) == SAMPLES
    assert flaky_s3.calls - calls < 40


@pytest.mark.usefixtures("tar_cache")
@pytest.mark.slow
def test_of_large_records_the_fields_are_read(flaky_s3: FlakyS3) -> None:
    images = [(bytes(len(image)), i % 7) for i, image in enumerate(_members(160_000).values()) if len(image) > 9]
    shard = tfrecords(images)
    boto3.client("s3").put_object(Bucket="bucket", Key="train-0-of-1", Body=shard)
    calls, sent = flaky_s3.calls, flaky_s3.sent
    remote = TFRecords.scan("s3://bucket/train-*-of-1")
    assert [remote.read(id) for id in (0, SAMPLES - 1)] == [images[id][0] for id in (0, SAMPLES - 1)]
    assert flaky_s3.sent - sent < len(shard) / 5
    assert flaky_s3.calls - calls < 2.5 * SAMPLES


@pytest.mark.parametrize("remote", [True, False])
def test_an_index_beside_the_runs_serves_a_new_machine(
    remote: bool, flaky_s3: FlakyS3, tar_cache: Path, tmp_path: Path
) -> None:
    client, data = boto3.client("s3"), f"train-{remote}"  # a process keeps what it has opened
    client.put_object(Bucket="bucket", Key=f"{data}/0.tar", Body=packed(_members(20)))
    where = "s3://bucket/runs" if remote else str(tmp_path / "runs")
    cache_with_runs(f"{where}/")
    first = TarShards.scan(f"s3://bucket/{data}")
    kept = {entry["Key"] for entry in client.list_objects_v2(Bucket="bucket")["Contents"]} - {f"{data}/0.tar"}
    kept |= {str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").rglob("*.npz")}
    assert [path.startswith(f"runs/{RUNS_CACHE}/tar-2/") for path in kept] == [True]
    shutil.rmtree(tar_cache)
    sent, calls = flaky_s3.sent, flaky_s3.calls
    again = TarShards.scan(f"s3://bucket/{data}")
    assert flaky_s3.calls - calls <= 5 and not tar_cache.exists()
    assert samples(again)[:3] == samples(first)[:3] and again.fingerprint == first.fingerprint

    client.put_object(Bucket="bucket", Key=f"{data}/0.tar", Body=packed({"0.jpg": b"other", "0.cls": b"7"}))
    assert samples(TarShards.scan(f"s3://bucket/{data}")) == [("0.tar:0.jpg", "7", b"other")]
    assert sent < flaky_s3.sent


@pytest.mark.parametrize(
    "storage", ["s3://no-such-bucket/runs", "/proc/runs", "~/raydali-runs", "s3://b/runs?region=x"]
)
@pytest.mark.usefixtures("flaky_s3")
def test_a_storage_that_takes_no_index_is_no_error(
    storage: str, tar_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "0.tar").write_bytes(packed(_members(20)))
    cache_with_runs(storage)
    assert len(TarShards.scan(str(tmp_path / "0.tar"))) == SAMPLES
    assert len([*tar_cache.iterdir()]) == 1 and not (tmp_path / "raydali-runs").exists()


def test_a_job_keeps_indexes_in_its_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "0.tar").write_bytes(packed(_members(20)))
    monkeypatch.setattr(
        "sys.argv", ["imagenet.py", "--data", str(tmp_path / "0.tar"), "--storage", str(tmp_path / "runs")]
    )
    config = parse(Config, demo=DIGITS)
    TarShards.scan(str(config.data))
    assert len([*(tmp_path / "runs" / RUNS_CACHE / "tar-2").iterdir()]) == 1
