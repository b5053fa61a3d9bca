"""`raydali verify`: what it finds is what a run would, in class folders, lists and shards; and what jobs make of it."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raydali.commands.verify import Kind, Verify, main
from raydali.data.index.exclusion import exclude, read_list
from raydali.data.index.formats import train_and_val
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.labeled import LabeledFiles
from raydali.data.index.tar import TarShards
from raydali.errors import DataError, UsageError
from tests.support.broken import CONTENTS, KINDS, folder, jpeg
from tests.support.messages import mentioning, mentions
from tests.support.parquets import write_parquet
from tests.support.pictures import photograph
from tests.support.tars import packed, tar_cache  # noqa: F401 (a fixture)
from tests.support.videos import ROTATIONS, moving, write_video

BROKEN = {2 * place + 1: kind for place, kind in enumerate(KINDS)}
SAMPLES = 40
RAYDALI = str(Path(sys.executable).with_name("raydali"))


def test_class_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "images", SAMPLES, BROKEN)
    output = tmp_path / "broken.txt"
    # Indexed now: what has vanished is not there to be found.
    there = [id for id, kind in BROKEN.items() if kind not in ("vanished", "folder")]
    found = mentioning(f"{len(there)} {len(LabeledFiles.scan(source.root))} --exclude {output}")
    with pytest.raises(DataError, match=found):
        main(Verify(data=source.root, output=str(output), workers=2, json=str(tmp_path / "found.json")))
    told = capsys.readouterr()
    head, *lines = output.read_text().splitlines()
    assert head == f"# raydali verify {source.root}"
    assert [line.partition("\t")[0] for line in lines] == [source.path(id) for id in there]
    assert all(line.replace("\t", ": ") in told.out for line in lines)
    assert f"{len(there)} broken" in told.err
    in_json = json.loads((tmp_path / "found.json").read_text())["broken"]
    assert [row["path"] for row in in_json] == [source.path(id) for id in there]

    (rest,) = exclude(str(output), LabeledFiles.scan(source.root))
    assert {rest.path(id) for id in range(len(rest))} == {source.path(id) for id in range(SAMPLES) if id not in BROKEN}


def test_train_and_val(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, broken in (("train", {}), ("val", {3: "text"})):
        folder(tmp_path / split, 9, broken)
    main(Verify(data=str(tmp_path), split="train", workers=1))
    assert "9 samples, none broken" in capsys.readouterr().out
    with pytest.raises(DataError, match=mentioning("1 18 broken")):
        main(Verify(data=str(tmp_path), workers=1))
    assert f"{tmp_path}/val/1/0003.jpg: cannot identify image" in capsys.readouterr().out
    with pytest.raises(UsageError, match=mentioning("--split")):
        main(Verify(data=str(tmp_path / "val"), split="val"))
    with pytest.raises(UsageError, match=mentioning("--workers 1 0")):
        main(Verify(data=str(tmp_path), workers=0))


def test_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "images", 9, {4: "cut-short"})
    lines = (f"{source.path(id)},{source.labels[id]}\n" for id in range(9))
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(lines))
    with pytest.raises(DataError, match=mentioning("1 9 broken")):
        main(Verify(data=str(tmp_path / "list.csv"), workers=1))
    assert source.path(4) in capsys.readouterr().out


@pytest.mark.usefixtures("tar_cache")
def test_tar_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = jpeg()
    members = {f"{i:03}.jpg": good if i != 2 else CONTENTS["cut-short"](good) for i in range(6)}
    labels = {f"{i:03}.cls": str(i % 2).encode() for i in range(6)}
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/a-0.tar").write_bytes(packed(dict(sorted((members | labels).items()))))
    root = str(tmp_path / "shards")
    output = tmp_path / "broken.txt"
    with pytest.raises(DataError, match=mentioning("1 6 broken")):
        main(Verify(data=root, output=str(output), workers=1))
    assert mentions(capsys.readouterr().out, f"{root}/a-0.tar:002.jpg")
    shards = TarShards.scan(root)
    (rest,) = exclude(str(output), shards)
    kept = [0, 1, 3, 4, 5]
    assert [rest.path(id) for id in range(5)] == [shards.path(id) for id in kept]
    assert [rest.read(id) for id in range(5)] == [shards.read(id) for id in kept]
    assert rest.labels.tolist() == shards.labels[kept].tolist()


@pytest.mark.usefixtures("tar_cache")
def test_a_folder_cloned_from_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "clone"
    write_parquet(data / "data/train-00000-of-00001.parquet", [jpeg()] * 3, [0, 1, 0])
    write_parquet(data / "data/test-00000-of-00001.parquet", [jpeg(), b"GIF89a"], [0, 1])
    assert [len(each) for each in train_and_val(str(data))] == [3, 2]
    main(Verify(data=str(data), split="train", workers=1))
    assert "3 samples, none broken" in capsys.readouterr().out
    with pytest.raises(DataError, match=mentioning("1 5 broken")):
        main(Verify(data=str(data), workers=1))
    assert mentions(capsys.readouterr().out, f"{data}/data/test-00000-of-00001.parquet#1 GIF")


@pytest.mark.slow
def test_exit_codes_and_a_bar_on_a_terminal(tmp_path: Path) -> None:
    clean, broken = folder(tmp_path / "clean", 9, {}), folder(tmp_path / "broken", 9, {4: "bomb"})
    for data, code in ((clean.root, 0), (f"{tmp_path}/nothing", 2)):
        done = subprocess.run([RAYDALI, "verify", data, "--workers", "1"], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([RAYDALI, "verify", broken.root], stderr=slave, stdout=subprocess.PIPE, env=environment)
    os.close(slave)
    shown = b""
    while True:
        try:
            shown += (part := os.read(master, 4096))
        except OSError:
            break
        if not part:
            break
    os.close(master)
    assert process.wait() == 1
    assert "9/9" in shown.decode() and mentions(shown.decode(), "1 9 broken")


def test_a_name_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "images", 3, {})
    Path(source.path(0)).rename(Path(source.root, "0", os.fsdecode(b"\xff.jpg")))
    Path(source.path(1)).write_bytes(b"")
    Path(source.root, "0", os.fsdecode(b"\xff.jpg")).write_bytes(b"")
    output = tmp_path / "broken.txt"
    with pytest.raises(DataError, match=mentioning("2 3 broken")):
        main(Verify(data=source.root, output=str(output), workers=1))
    assert r"/0/\xff.jpg: cannot identify" in capsys.readouterr().out
    assert b"/0/\xff.jpg\tcannot identify" in output.read_bytes()


def test_what_a_list_may_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = folder(tmp_path / "images", 6, {})
    file = tmp_path / "list.txt"
    file.write_text(f"# names\n{source.path(1)}\twhy\n0/0000.jpg\n\n2/none.jpg\n")
    (rest,) = exclude(str(file), source)
    assert [rest.path(id) for id in range(len(rest))] == [source.path(id) for id in (2, 3, 4, 5)]
    assert rest.labels.tolist() == source.labels[2:].tolist() and rest.classes == source.classes
    assert mentions(caplog.text, "1 2/none.jpg")
    assert exclude(None, source) == [source]
    for text, message in (
        ("nothing.jpg\n", "lists no sample"),
        ("".join(f"{source.path(id)}\n" for id in range(6)), "all 6 samples"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=message):
            exclude(str(file), source)
    with pytest.raises(UsageError, match=mentioning("--exclude gone.txt")):
        exclude(str(tmp_path / "gone.txt"), source)


def test_files_are_not_asked_for_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path / "images", 6, {})
    (tmp_path / "list.txt").write_text("1/0002.jpg\n")
    with monkeypatch.context() as patch:  # a million times that would take seconds
        patch.setattr(LabeledFiles, "encoded_paths", lambda *args: pytest.fail("asked"))
        (rest,) = exclude(str(tmp_path / "list.txt"), source)
    assert [rest.path(id) for id in range(len(rest))] == [source.path(id) for id in (0, 1, 3, 4, 5)]


def test_either_image_of_a_pair(tmp_path: Path) -> None:
    for part in ("img", "gt"):
        for i in range(3):
            path = tmp_path / "pairs" / part / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg())
    (tmp_path / "list.txt").write_text(f"gt/0.jpg\n{tmp_path}/pairs/img/2.jpg\n")
    (rest,) = exclude(str(tmp_path / "list.txt"), ImagePairs.scan(str(tmp_path / "pairs")))
    assert [rest.path(0)] == [f"{tmp_path}/pairs/img/1.jpg and {tmp_path}/pairs/gt/1.jpg"] and len(rest) == 1


def _verified(data: Path, kind: Kind, broken: set[str], capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """What is printed; of so many samples just these are broken, and `--exclude` understands their names."""
    output = data.parent / "broken.txt"
    try:
        main(Verify(data=str(data), kind=kind, output=str(output), workers=1, **options))
    except DataError as error:
        print(error)
    assert read_list(str(output)) == broken
    return capsys.readouterr().out


def test_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "pairs"
    for split in ("train", "test"):
        for part in ("img", "gt"):
            for i in range(3):
                path = data / split / part / f"{i}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(jpeg((60, 50)))
    assert "6 samples, none broken" in _verified(data, "pairs", set(), capsys)
    (data / "train/gt/1.jpg").write_bytes(jpeg((50, 60)))
    (data / "test/img/2.jpg").write_bytes(jpeg()[:-900])
    pair = "{0}/{1}/img/{2}.jpg and {0}/{1}/gt/{2}.jpg"
    broken = {pair.format(data, "train", 1), pair.format(data, "test", 2)}
    said = _verified(data, "pairs", broken, capsys)
    assert mentions(said, "train/gt/1.jpg 50x60 60x50")
    assert mentions(said, "/test/img/2.jpg") and mentions(said, "2 6 broken")
    _verified(data, "pairs", {pair.format(data, "train", 1)}, capsys, split="train")
    assert mentions(_verified(data / "train", "pairs", {pair.format(data, "train", 1)}, capsys), "1 3 broken")
    (rest,) = exclude(str(tmp_path / "broken.txt"), ImagePairs.scan(str(data / "train")))
    assert len(rest) == 2
    with pytest.raises(UsageError, match=mentioning("--split --kind")):
        main(Verify(data=str(data), kind="pairs", split="val"))


def test_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, sound = tmp_path / "cells", Image.fromarray(np.arange(50 * 60, dtype=np.uint8).reshape(50, 60) % 3)
    masks = [sound, sound.resize((50, 60)), sound.point(lambda value: 3), sound.convert("RGB"), sound, sound, sound]
    masks[6] = sound.point(lambda value: 255)
    for split in ("train", "val"):
        for part in ("images", "masks"):
            (data / split / part).mkdir(parents=True)
        for i, mask in enumerate(masks if split == "train" else masks[:1]):
            (data / split / f"images/{i}.jpg").write_bytes(jpeg((60, 50)))
            mask.save(data / split / f"masks/{i}.png")
    (data / "train/images/4.jpg").write_bytes(jpeg()[:-900])
    (data / "train/masks/5.png").write_bytes(b"")
    pair = f"{data}/train/images/{{0}}.jpg and {data}/train/masks/{{0}}.png"
    said = _verified(data, "masks", {pair.format(i) for i in range(1, 7)}, capsys, classes="3")
    assert "6 broken samples among 8" in said
    for words in (
        "60x50 50x60",
        "2.png 3 --classes --ignore-index",
        "3.png RGB",
        "4.jpg",
        "5.png empty",
        "6.png ignored",
    ):
        assert mentions(said, words), words
    assert "1 sample, none broken" in _verified(data, "masks", set(), capsys, classes="3", split="val")
    left = _verified(data, "masks", {pair.format(i) for i in (1, 3, 4, 5, 6)}, capsys, classes="9", split="train")
    assert "5 broken samples among 7" in left
    with pytest.raises(UsageError, match=mentioning("--classes 3 --kind masks")):
        main(Verify(data=str(data), kind="pairs", classes="3"))
    (tmp_path / "list.csv").write_text("cells/train/images/0.jpg,cells/train/masks/0.png\n")
    assert "1 sample, none broken" in _verified(tmp_path / "list.csv", "masks", set(), capsys, classes="3")


def test_classes_without_a_validation_sample_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train/a/1.png", "train/b/2.png", "val/a/3.png", "val/b"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9)).save(tmp_path / name) if name.endswith("png") else (tmp_path / name).mkdir()
    main(Verify(data=str(tmp_path), split="val", workers=1))
    assert "1 sample, none broken" in capsys.readouterr().out


def test_masks_of_another_convention_and_images_that_exif_turns_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exif = Image.Exif()
    exif[274] = 3
    for i in range(4):
        for kind, image in (("images", Image.new("RGB", (60, 50))), ("masks", Image.new("L", (60, 50)))):
            (tmp_path / kind).mkdir(exist_ok=True)
            image.paste(255 if kind == "masks" else "red", (5 * i, 0, 20 + i, 30))
            image.save(tmp_path / kind / f"{i}.png")
    with pytest.raises(UsageError, match=mentioning("'0' 3 masks --mask-values 0 255")):
        main(Verify(data=str(tmp_path), kind="masks", classes="2", workers=1))
    assert "4 samples, none broken" in capsys.readouterr().out
    main(Verify(data=str(tmp_path), kind="masks", mask_values=(0, 255), workers=1))
    Image.new("RGB", (60, 50)).save(tmp_path / "images/2.png", exif=exif)
    broken = {f"{tmp_path}/images/2.png and {tmp_path}/masks/2.png"}
    assert mentions(_verified(tmp_path, "masks", broken, capsys, mask_values=(0, 255)), "2.png EXIF upright")


def test_boxes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "coco"
    names = [f"{i}.jpg" for i in range(5)]
    images = [{"id": i, "file_name": name, "width": 60, "height": 50} for i, name in enumerate(names)]
    images[4] |= {"width": 50, "height": 60}
    content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    for split in ("train2017", "val2017"):
        for name in names[:4] if split == "val2017" else names:
            (data / split).mkdir(parents=True, exist_ok=True)
            (data / split / name).write_bytes(jpeg((60, 50)))
        (data / "annotations").mkdir(exist_ok=True)
        (data / f"annotations/instances_{split}.json").write_text(json.dumps(content))
    (data / "val2017/1.jpg").write_bytes(b"")
    broken = {f"{data}/{name}" for name in ("train2017/4.jpg", "val2017/4.jpg", "val2017/1.jpg")}
    said = _verified(data, "boxes", broken, capsys)
    assert mentions(said, "train2017/4.jpg 60x50 50x60")
    assert "val2017/4.jpg: No such file" in said and mentions(said, "3 10 broken")


def test_videos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "videos"
    for i, codec in enumerate(("h264", "vp9", "mjpeg")):
        path = data / f"{i % 2}" / f"{i}.{'webm' if codec == 'vp9' else 'avi' if codec == 'mjpeg' else 'mp4'}"
        write_video(path, moving(300 if codec == "h264" else 20), codec)
    whole = (data / "0/0.mp4").read_bytes()
    (data / "0/0.mp4").write_bytes(whole[:4000] + bytes(9000) + whole[13000:])
    (data / "1/1.webm").write_bytes(b"")
    said = _verified(data, "videos", {f"{data}/0/0.mp4", f"{data}/1/1.webm"}, capsys)
    assert mentions(said, "2 3 broken")


def test_rotated_videos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, rotation in enumerate(ROTATIONS):
        write_video(tmp_path / "videos" / "a" / f"{i}.mp4", moving(20), "h264", rotation=rotation)
    main(Verify(data=str(tmp_path / "videos"), kind="videos", workers=1))
    assert mentions(capsys.readouterr().out, f"{len(ROTATIONS)} samples none broken")


def test_transparent_pixels_are_counted(tmp_path: Path) -> None:
    photo = photograph(size=(40, 30)).convert("RGBA")
    made = {"opaque.png": photo, "clear.webp": photo.copy(), "clear.png": photo.copy()}
    made["clear.png"].putpixel((3, 3), (1, 2, 3, 0))
    made["clear.webp"].putalpha(128)
    made["grey.png"] = photo.convert("LA")
    made["grey.png"].putalpha(0)
    (tmp_path / "c").mkdir()
    for name, image in made.items():
        image.save(tmp_path / "c" / name)
    photo.convert("RGB").quantize(9).save(tmp_path / "c/palette.png", transparency=3)
    Image.new("L", (9, 9), 7).save(tmp_path / "c/one-grey.png", transparency=8)
    Image.fromarray(np.full((9, 9), 700, np.uint16)).save(tmp_path / "c/16-bit.png", transparency=700)
    done = subprocess.run(
        [RAYDALI, "verify", str(tmp_path), "--json", str(tmp_path / "j")], capture_output=True, text=True
    )
    assert done.returncode == 0 and "UserWarning" not in done.stderr
    told = "7 samples, none broken; 5 with transparent pixels"
    assert told in done.stdout and json.loads((tmp_path / "j").read_text())["transparent"] == 5


@pytest.mark.parametrize("kind", ["images", "pairs", "masks", "boxes", "videos"])
@pytest.mark.parametrize(
    "given",
    [
        {"output": "/nowhere/broken.txt"},
        {"json": "/nowhere/found.json"},
        {"output": "/proc/broken.txt"},  # root may write there, but there are no files
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_data_is_read(kind: Kind, given: dict[str, str]) -> None:
    ((option, path),) = given.items()
    with pytest.raises(UsageError, match=mentioning(f"--{option} {path}")):
        main(Verify(data="/no/data", kind=kind, output=given.get("output"), json=given.get("json")))
