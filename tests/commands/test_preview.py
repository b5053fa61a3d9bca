"""`raydali preview`: the ids, pixels and names of each rank's first batch, in training and in validation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.imagenet import Config, train_pipeline, val_pipeline
from raydali import cli
from raydali.commands import preview
from raydali.commands.preview import Preview, main
from raydali.data.builtin.digits import digits_folder
from raydali.data.builtin.shapes import shapes_folder
from raydali.data.index.formats import labeled_images
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.errors import DataError, UsageError
from raydali.report import contact_sheet
from raydali.report.contact_sheet import Sheet
from tests.support.copied_jobs import changed_copy
from tests.support.messages import mentioning, mentions
from tests.support.pictures import encoded, photograph

SMALL = {"batch_size": 4, "image_size": 32, "resize_size": 40}
OURS = "pipeline", "workers", "show", "device", "output", "job"


def preview_of(data: object, output: object, **given: Any) -> Preview:
    """The options of a preview on the CPU; those of the job as on its command line."""
    options = {"device": "cpu", "output": str(output), "data": data, **SMALL, **given}
    ours = {name: options.pop(name) for name in OURS if name in options}
    given = {name: value for name, value in options.items() if value is not None}
    texts = ((f"--{name.replace('_', '-')}", "" if value is True else str(value)) for name, value in given.items())
    return Preview(**ours, of_job=tuple(word for pair in texts for word in pair if word))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`train/` and `val/` of two classes, and the lists of the same files."""
    root = tmp_path_factory.mktemp("data")
    for split, count in (("train", 20), ("val", 10)):
        lines = ["path,label"]
        for i in range(count):
            file = root / split / ("cat", "dog")[i % 2] / f"{i:03}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(photograph(("china", "flower")[i % 2], (60 + i, 80 - i))))
            lines.append(f"{file.relative_to(root)},{file.parent.name}")
        (root / f"{split}.csv").write_text("\n".join(lines))
    return root


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Sheet]:
    """The sheets that are drawn from here on."""
    drawn: list[Sheet] = []
    as_png = contact_sheet.as_png

    def keep(made: Sheet) -> bytes:
        drawn.append(made)
        return as_png(made)

    monkeypatch.setattr(contact_sheet, "as_png", keep)
    return drawn


@pytest.mark.parametrize(("pipeline", "listed"), [("train", False), ("val", False), ("train", True)])
def test_what_each_rank_gets(
    pipeline: Any, listed: bool, data: Path, drawn: list[Sheet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = str(data / f"{pipeline}.csv") if listed else str(data)
    output = tmp_path / "sheet.png"
    lists = {"val_data": data / "val.csv"} if listed else {}
    main(preview_of(named, output, pipeline=pipeline, workers=3, show=3, seed=7, **lists))
    (made,) = drawn
    total = 12 if pipeline == "train" else 10
    assert mentions(capsys.readouterr().out, f"{output} 3 ranks {total} ids")
    assert output.read_bytes().startswith(b"\x89PNG") and made.good
    sizes = [4, 4, 4] if pipeline == "train" else [4, 4, 2]
    assert [row.caption for row in made.rows] == [f"first 3 of {n}" if n > 3 else f"{n} images" for n in sizes]

    source = labeled_images(named) if listed else LabeledFiles.scan(f"{data}/{pipeline}")
    order = (
        Stream(samples=20, epochs=90, batch_size=4, global_batch_size=12, seed=7)
        if pipeline == "train"
        else OrderedPass(samples=10, batch_size=4)
    )
    for rank, row in enumerate(made.rows):
        pictures = row.pictures
        ids = next(iter(order.micro_batches(rank, 3))).ids[:3].tolist()
        assert row.title == f"rank {rank}"
        assert [picture.facts for picture in pictures] == [[f"id {id}"] for id in ids]
        assert [picture.file for picture in pictures] == [source.path(id) for id in ids]
        assert [picture.label for picture in pictures] == [Path(source.path(id)).parent.name for id in ids]
    config = replace(Config(), image_size=32, resize_size=40, seed=7)
    of_job = (train_pipeline if pipeline == "train" else val_pipeline)(config)
    with make_loader("dali", source, of_job, order, rank=1, world_size=3) as loader:
        images = next(iter(loader))["images"].permute(0, 2, 3, 1).numpy()
    assert np.array_equal([picture.pixels for picture in made.rows[1].pictures], images[:3])
    assert f"{data if listed else source}: {len(source)} samples of 2 classes" in made.facts[0]
    assert mentions(made.facts[1], "world 3 batch 4 32 x 32 seed 7 CPU")


def test_the_command_and_a_page(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "sheet.HTML")
    arguments = f"--workers 1 --batch-size 2 --image-size 32 --device cpu --root {data}".split()
    cli.main(["preview", "--data", str(data / "train.csv"), "--val-fraction", "0.2", *arguments, "-o", output])
    assert mentions(capsys.readouterr().out, f"{output} 1 rank 2 ids")
    assert Path(output).read_text().count("<img ") == 2


def test_an_id_that_comes_twice_is_told(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a broken order: a rank that takes itself for the only one."""
    asked = Stream.micro_batches
    monkeypatch.setattr(Stream, "micro_batches", lambda self, rank, world_size, start=0: asked(self, 0, 1, start=start))
    output = tmp_path / "sheet.png"
    with pytest.raises(DataError, match=mentioning("4 8 ids rank 0 1")):
        main(preview_of(data, output))
    assert output.exists()


def test_a_copied_job_is_drawn_as_it_says(tmp_path: Path, drawn: list[Sheet]) -> None:
    """Here the shapes of the demo of the detector, and a validation of the digits in another size."""
    main(preview_of(shapes_folder(), tmp_path / "a.png", job="detection", image_size=64, resize_size=None))
    size = "ValidationImages(image_size="
    file = changed_copy("imagenet", {f"{size}config.validation_size": f"{size}24"}, tmp_path)
    main(preview_of(digits_folder(), tmp_path / "b.png", job=str(file), pipeline="val", show=2))
    boxes, small = drawn
    assert {picture.pixels.shape for row in boxes.rows for picture in row.pictures} == {(64, 64, 3)}
    assert {picture.pixels.shape for row in small.rows for picture in row.pictures} == {(24, 24, 3)}
    assert "class" in small.facts[0] and "detection" in boxes.title


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "--device 0"),
        ({"device": "-1"}, "--device -1"),
        ({"device": "3"}, "--device 3 2 0"),
        ({"workers": 0}, "--workers 1 64 0"),
        ({"workers": 65}, "--workers 1 64 65"),
        ({"show": 33}, "--show 1 32 33"),
        ({"batch_size": 0}, "--batch-size 1 0"),
        ({"workers": 6}, "--workers 6 --batch-size 4 24 20"),
        ({"workers": 4, "pipeline": "val"}, "--workers 4 --batch-size 13 10"),
        ({"output": "{tmp}/none/sheet.png"}, "--output none/sheet.png"),
        ({"output": "{tmp}/folder.png"}, "--output folder.png"),
        ({"output": "/dev/full/sheet.png"}, "--output /dev/full/sheet.png"),
        ({"output": "{tmp}/sheet.jpg"}, "sheet.jpg .png .html"),
        ({"data": "{tmp}"}, "1 class folder"),
        ({"data": "{tmp}/none"}, "--data none"),
        ({"data": "{tmp}/empty.csv", "val_fraction": 0.5}, "empty.csv path,label"),
        ({"root": "{tmp}"}, "--root /train"),
        ({"pipeline": "val", "resize_size": 8}, "resize_size 8 image_size 32 37"),
    ],
)
def test_bad_usage(
    options: dict[str, Any], message: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "gpu_names", lambda: ["A", "B"])
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "empty.csv").touch()
    given = {"data": str(data), "output": f"{tmp_path}/sheet.png"} | options
    given = {name: value.format(tmp=tmp_path) if isinstance(value, str) else value for name, value in given.items()}
    with pytest.raises(UsageError, match=mentioning(message)) as error:
        main(preview_of(**given))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "sheet.png").exists()


def test_a_full_disk_is_bad_usage(data: Path, tmp_path: Path) -> None:
    (tmp_path / "sheet.png").symlink_to("/dev/full")
    with pytest.raises(UsageError, match=mentioning("sheet.png")):
        main(preview_of(data, tmp_path / "sheet.png"))


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    for name in ("1.jpg", "2.jpg"):
        (tmp_path / "cat").mkdir(exist_ok=True)
        (tmp_path / "cat" / name).write_bytes(encoded(photograph(size=(60, 40)))[:300])
    with pytest.raises(DataError, match=mentioning("sample /cat/ .jpg")):
        main(preview_of(tmp_path, tmp_path / "s.png", workers=1, batch_size=1, val_fraction=0.5))


@pytest.mark.gpu
def test_on_a_gpu(data: Path, drawn: list[Sheet], tmp_path: Path) -> None:
    for device in ("cpu", "0"):
        main(preview_of(data, tmp_path / "sheet.png", device=device))
    by_cpu, by_gpu = drawn
    assert "decoded on GPU 0, " in by_gpu.facts[1]
    for ours, theirs in zip(by_gpu.rows[1].pictures, by_cpu.rows[1].pictures, strict=True):
        assert ours.facts == theirs.facts
        assert np.abs(ours.pixels.astype(int) - theirs.pixels).mean() < 2


def test_several_labels_of_an_image_are_shown(data: Path, drawn: list[Sheet], tmp_path: Path) -> None:
    lines = [f"train/{('cat', 'dog')[i % 2]}/{i:03}.jpg,{i % 2},{int(i > 9)}\n" for i in range(20)]
    (tmp_path / "list.csv").write_text("path,odd,late\n" + "".join(lines))
    given = {"root": data, "val_data": tmp_path / "list.csv", "multi_label": True}
    main(preview_of(tmp_path / "list.csv", tmp_path / "sheet.png", **given))
    shown = {picture.facts[0]: picture.label for row in drawn[0].rows for picture in row.pictures}
    assert len(shown) == 8
    for fact, label in shown.items():
        id = int(fact.removeprefix("id "))
        assert label == (", ".join(["odd"] * (id % 2) + ["late"] * (id > 9)) or "none")
