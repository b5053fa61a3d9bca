"""`raydali prepare`: the same classes and ids in smaller files, whatever happens on the way."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import psutil
import pytest

from raydali import cli
from raydali.commands.prepare import Prepare, main
from raydali.data.decode.pillow import decoded
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.errors import DataError, UsageError
from tests.support.broken import CONTENTS, damage, folder, jpeg
from tests.support.disks import small_disk
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.pictures import assert_like_pillow, encoded, one_batch, photograph
from tests.support.tars import packed
from tests.support.trees import NASTY

RAYDALI = str(Path(sys.executable).with_name("raydali"))


def prepare(source: object, target: object, side: int = 48, **options: Any) -> None:
    main(Prepare(source=str(source), target=str(target), shorter_side=side, **{"workers": 1} | options))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def grow(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """9 and 6 photographs, shorter sides from 50 pixels on; and one of 20 x 30."""
    for split, samples in (("train", 9), ("val", 6)):
        folder(tmp_path / "source" / split, samples, {})
    return grow(tmp_path / "source", {"train/1/small.jpg": jpeg((20, 30))})


def test_train_and_val(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / "train/3").mkdir()  # a class without images
    grow(source, {"train/1/notes.txt": b"no image", "README": b"neither"})
    target = tmp_path / "target"
    prepare(source, target, workers=2, json=str(tmp_path / "done.json"))
    told = capsys.readouterr()
    assert "16 images in " in told.out and mentions(told.out, "15 smaller 1 copied 0 broken")
    assert mentions(told.err, f"{source} 16 read 0 broken")
    for split in ("train", "val"):
        before, after = LabeledFiles.scan(str(source / split)), LabeledFiles.scan(str(target / split))
        assert after.classes == before.classes and after.labels.tolist() == before.labels.tolist()
        assert after.fingerprint == before.fingerprint  # relative paths and all of the above
        for id in range(len(before)):
            was, now = decoded(before.read(id)), decoded(after.read(id))
            assert min(now.size) == min(48, min(was.size))
    made, given = contents(target), contents(source)
    assert made["train/1/small.jpg"] == given["train/1/small.jpg"]
    assert not {"README", "train/1/notes.txt"} & made.keys() and not any(name.endswith(".part") for name in made)
    done, record = json.loads((tmp_path / "done.json").read_text()), json.loads(made.pop("prepared.json"))
    assert (record.pop("complete"), record.pop("broken")) == (True, 0)
    assert record == {name: done[name] for name in record}
    assert (done["made_smaller"], done["copied"], done["broken"], done["shorter_side"]) == (15, 1, [], 48)
    assert done["bytes_before"] == sum(len(given[name]) for name in made) and done["seconds"] > 0
    assert done["bytes_after"] == sum(len(data) for data in made.values()) < done["bytes_before"]


def test_loaders_read_what_was_prepared(tmp_path: Path) -> None:
    """As the originals at the size of a model, by DALI and by torch's DataLoader."""
    image = photograph(size=(400, 300))
    rgba = image.convert("RGBA")
    files = {
        "a/1.jpg": encoded(image),
        "a/2.jpg": encoded(image.convert("CMYK")),
        "a/3.jpg": encoded(image.convert("L")),
        "b/1.png": encoded(rgba, "PNG"),
        "b/2.png": encoded(image.quantize(200), "PNG"),
        "b/3.JPEG": encoded(image, "PNG"),  # ImageNet has some
        "b/4.webp": encoded(image, "WEBP"),
    }
    prepare(grow(tmp_path / "source", files), tmp_path / "target", 160)
    before, after = (LabeledFiles.scan(str(tmp_path / name)) for name in ("source", "target"))
    assert after.fingerprint == before.fingerprint
    pipeline = ValidationImages(image_size=112, resize_size=112)
    was, _ = one_batch(pipeline, before)
    now, labels = one_batch(pipeline, after)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert (was.float() - now.float()).abs().mean(dim=(1, 2, 3)).max() < 3
    order = OrderedPass(samples=len(after), batch_size=len(after))
    with make_loader("torch", after, pipeline, order, device="cpu", threads=0) as loader:
        (batch,) = loader
        assert_like_pillow(now, batch["images"])
    crops, _ = one_batch(TrainImages(image_size=64, seed=0), after)
    assert crops.shape == (7, 3, 64, 64)


def test_nasty_names(tmp_path: Path) -> None:
    names = [*NASTY, "cat/" + "n" * 251 + ".jpg", "cat/" + os.fsdecode(b"\xff\xfe") + ".jpg"]
    source = grow(tmp_path / "source", {name: jpeg() for name in names})
    (source / "linked-class").symlink_to(source / "cat-dog")
    prepare(source, tmp_path / "target")
    before, after = (LabeledFiles.scan(str(tmp_path / name)) for name in ("source", "target"))
    assert after.fingerprint == before.fingerprint and after.classes == before.classes


def test_broken_images_are_left_out(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    broken = dict(zip(sorted((source / "train").rglob("000*.jpg")), [*CONTENTS, "dangling-link"], strict=False))
    for path, kind in broken.items():
        damage(path, kind)
    with pytest.raises(DataError, match=mentioning("9 16 broken")):
        prepare(source, target, json=str(tmp_path / "done.json"))
    out = capsys.readouterr().out
    assert all(f"{path}: " in out for path in broken) and mentions(out, "6 smaller 1 copied")
    rows = json.loads((tmp_path / "done.json").read_text())["broken"]
    assert {row["path"] for row in rows} == {str(path) for path in broken} and all(row["reason"] for row in rows)
    left = {name for name in contents(target) if name != "prepared.json"}
    assert left == contents(source).keys() - {str(path.relative_to(source)) for path in broken}
    assert (target / "train/0").is_dir()  # the class, all of whose images are broken

    for path in broken:
        path.unlink()
        path.write_bytes(jpeg())
    prepare(source, target)
    assert mentions(capsys.readouterr().out, "9 smaller 0 copied 7 broken")
    for split in ("train", "val"):
        before, after = (LabeledFiles.scan(str(root / split)) for root in (source, target))
        assert after.fingerprint == before.fingerprint


def test_what_has_changed_is_made_again(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    prepare(source, target)
    changed, older, broken = sorted((source / "train").rglob("000[0-2].jpg"))
    changed.write_bytes(jpeg((90, 70)))
    older.write_bytes(jpeg((70, 90)))
    os.utime(older, (1e9, 1e9))  # restored from a backup
    broken.write_bytes(b"")
    with pytest.raises(DataError, match=mentioning("1 16 broken")):
        prepare(source, target)
    assert mentions(capsys.readouterr().out, "2 smaller 0 copied 13 1 broken")
    shapes = [decoded((target / path.relative_to(source)).read_bytes()).size for path in (changed, older)]
    assert [width > height for width, height in shapes] == [True, False]
    assert not (target / broken.relative_to(source)).exists()

    record = json.loads((target / "prepared.json").read_text())
    del record["to"]  # as an earlier version wrote it
    (target / "prepared.json").write_text(json.dumps(record))
    broken.write_bytes(jpeg())
    prepare(source, target)
    assert mentions(capsys.readouterr().out, "1 smaller 0 copied 15 broken")
    os.utime(changed, (time.time() + 9, time.time() + 9))
    prepare(source, target)
    assert mentions(capsys.readouterr().out, "1 smaller 0 copied 15 broken")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_goes_on(how: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo = encoded(photograph(size=(700, 500)))
    source = grow(tmp_path / "source", {f"{i % 3}/{i:03}.jpg": photo for i in range(120)})
    target = tmp_path / "target"
    command = [RAYDALI, "prepare", str(source), str(target), "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while len(made := [*target.glob("*/*.jpg")]) < 20:
            time.sleep(0.01)
        if how == signal.SIGKILL:
            started = psutil.Process(process.pid).children(recursive=True)
            process.kill()  # and not those it has started
            assert not psutil.wait_procs(started, timeout=60)[1]
        else:
            os.killpg(process.pid, how)
        errors = process.communicate(timeout=240)[1]  # which all its processes hold open while they live
    assert process.returncode == (130 if how == signal.SIGINT else -how), errors
    assert "Traceback" not in errors
    made = [*target.glob("*/*.jpg")]
    assert 20 <= len(made) < 120 and json.loads((target / "prepared.json").read_text())["complete"] is False
    assert all(min(decoded(path.read_bytes()).size) == 320 for path in made)
    times = {path: path.stat().st_mtime_ns for path in made}
    emptied = made[0]
    emptied.write_bytes(b"")  # as after a power cut

    prepare(source, target, 320, workers=2)
    told = capsys.readouterr().out
    assert f"{121 - len(made)} made smaller, 0 copied, {len(made) - 1} done before" in told
    assert all(path.stat().st_mtime_ns == at for path, at in times.items() if path != emptied)
    assert len({path.read_bytes() for path in target.glob("*/*.jpg")}) == 1
    assert LabeledFiles.scan(str(target)).fingerprint == LabeledFiles.scan(str(source)).fingerprint
    assert not [*target.rglob(".*.part")]


def test_other_settings_or_sources_are_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    prepare(source, target)
    was = contents(target)
    (tmp_path / "link").symlink_to(source)
    for other, options, message in (
        (source, {"side": 50}, r"was made of --shorter-side 48, not of --shorter-side 50: give another target, or"),
        (source, {"quality": 80}, "was made of --quality 90, not of --quality 80"),
        (source / "train", {}, f"was made of {source}, not of {source}/train"),
    ):
        with pytest.raises(UsageError, match=message):
            prepare(other, target, **options)
    grow(source, {"train/1/another.jpg": jpeg()})
    with pytest.raises(UsageError, match=mentioning("changed target")):
        prepare(source, target)
    assert contents(target) == was
    (tmp_path / "full").mkdir()
    grow(tmp_path / "full", {"prepared.json": b"{", "cat/1.jpg": b"mine"})
    with pytest.raises(UsageError, match=mentioning("prepared.json")):
        prepare(source, tmp_path / "full")


def test_two_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    other = os.open(tmp_path / "target", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match=mentioning("another `raydali prepare`")):
        prepare(source, tmp_path / "target")
    os.close(other)
    prepare(source, tmp_path / "target")


def test_places_that_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    for target in (source, tmp_path, source / "train/new", tmp_path / "link", tmp_path / "link/new/deep"):
        with pytest.raises(UsageError, match=mentioning(f"{source} {target}")):
            prepare(source, target)
    for place in (RAYDALI, "/proc/none"):
        with pytest.raises(UsageError, match=mentioning(place)):
            prepare(source, place)
    assert not (source / "train/new").exists()


@pytest.mark.usefixtures("source")
def test_data_that_is_refused(tmp_path: Path) -> None:
    grow(tmp_path, {"list.csv": b"path,label\na.jpg,0\n", "shards/a-0.tar": packed({"1.jpg": b"", "1.cls": b"0"})})
    grow(tmp_path, {"flat/1.jpg": jpeg(), "texts/a/1.txt": b"", "coco/train2017/1.jpg": jpeg()})
    grow(tmp_path, {"coco/annotations/instances_train2017.json": b"{}"})
    grow(tmp_path, {f"pairs/{split}/{side}/1.jpg": jpeg() for split in ("train", "test") for side in ("img", "gt")})
    for name, values in (
        ("list.csv", "list.csv"),
        ("shards/a-{0..9}.tar", "shards/a-{0..9}.tar"),
        ("flat", "flat images .jpg"),
        ("texts", "texts images .jpg"),
        ("coco", "coco boxes"),
        ("pairs", "pairs pixels"),
        ("pairs/test", "pairs/test pixels"),
        ("nothing", "nothing class folders"),
    ):
        with pytest.raises(UsageError, match=mentioning(values)):
            prepare(tmp_path / name, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_options_that_are_refused(source: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"side": -1}, r"--shorter-side must be 0 \(no resizing\) or more, not -1"),
        ({"quality": 0}, "--quality must be from 1 to 100, not 0"),
        ({"quality": 101}, "--quality must be from 1 to 100, not 101"),
        ({"workers": 0}, "--workers must be at least 1, not 0"),
        ({"json": "/no/folder/file"}, "--json /no/folder/file cannot be written"),
    ):
        with pytest.raises(UsageError, match=message):
            prepare(source, tmp_path / "target", **options)
    assert not (tmp_path / "target").exists()


def test_a_full_disk(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", kilobytes=600) as disk:
        target = disk.path / "target"
        disk.fill(leave=40_000)
        with pytest.raises(SystemExit) as left:
            cli.main(["prepare", str(source), str(target), "--shorter-side", "48", "--workers", "1"])
        error = capsys.readouterr().err.splitlines()[-1]
        assert left.value.code == 1
        assert error.startswith(f"error: {target}/train/") and mentions(error, "space left room")
        made = [*target.rglob("*.jpg")]
        assert 0 < len(made) < 16 and not [*target.rglob(".*.part")]
        assert all(decoded(path.read_bytes()) for path in made)
        disk.clear()
        prepare(source, target)
        assert f"{len(made)} done before" in capsys.readouterr().out
        assert len([*target.rglob("*.jpg")]) == 16


@pytest.mark.slow
def test_objects_in_s3(
    s3: PutObjects,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    s3("prepared", {f"pets/{name}": data for name, data in contents(source).items()})
    prepare("s3://prepared/pets/", tmp_path / "of-s3")
    prepare(source, tmp_path / "of-files")
    of_s3, of_files = contents(tmp_path / "of-s3"), contents(tmp_path / "of-files")
    assert json.loads(of_s3.pop("prepared.json"))["source"] == "s3://prepared/pets"
    of_files.pop("prepared.json")
    assert of_s3 == of_files and np.all([len(data) for data in of_s3.values()])
    capsys.readouterr()
    prepare("s3://prepared/pets/", tmp_path / "of-s3")
    assert "16 done before" in capsys.readouterr().out
    time.sleep(1.1)  # S3's times are whole seconds
    boto3.client("s3").put_object(Bucket="prepared", Key="pets/train/1/small.jpg", Body=jpeg((21, 31)))
    prepare("s3://prepared/pets/", tmp_path / "of-s3")
    assert mentions(capsys.readouterr().out, "1 copied 15")
