"""`raydali replay` of real runs: a step of 3 workers in this process, planted pictures, and what it cannot show."""

import gc
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from jobs.imagenet import open_data, train_pipeline
from raydali.commands import replay
from raydali.commands.replay import Replay
from raydali.commands.replay_sheet import replay_sheet
from raydali.data.builtin.shapes import masked_shapes_folder, shapes_folder
from raydali.errors import CommandError, UsageError
from raydali.host.facts import versions
from raydali.run.data_contents import check_contents, write_contents
from raydali.run.folder import RunFolder
from tests.support.copied_jobs import begun, changed_copy, opened
from tests.support.digits import SHORT
from tests.support.messages import mentioning, mentions
from tests.support.planted_pictures import PLANTED, STANDARDISED, id_of, planted_digits, planted_run, steps_of
from tests.support.ranks import LocalSession, Stopped, run_ranks
from tests.support.traces import read_samples

OPTIONS: dict[str, Any] = {"precision": "fp64", "learning_rate": 0.01, "epochs": 4, "checkpoint_every": 3}


@pytest.fixture(autouse=True)
def torch_is_restored() -> Iterator[None]:
    """A replay changes global settings of torch, and freezes all objects."""
    benchmark, dtype = torch.backends.cudnn.benchmark, torch.get_default_dtype()
    yield
    torch.backends.cudnn.benchmark = benchmark
    torch.set_default_dtype(dtype)
    gc.unfreeze()
    for name in [name for name in sys.modules if name.startswith("raydali_job_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the planted digits, a job whose loss is NaN for one, and its run on 3 workers, which skips it."""
    place = tmp_path_factory.mktemp("place")
    job = changed_copy("imagenet", STANDARDISED, place)
    planted_run(job, planted_digits(place / "digits"), place, workers=3, on_bad_loss="skip", **OPTIONS)
    return place


def replayed(place: Path, output: Path, step: int, **options: Any) -> dict[str, Any]:
    """What replay.json has."""
    given = {"job": str(place / "my_imagenet.py"), "device": "cpu", **options}
    replay.main(Replay(run=str(place / "run"), step=step, output=str(output), **given))
    found: dict[str, Any] = json.loads((output / "replay.json").read_text())
    return found


def contents(folder: Path) -> dict[str, str]:
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*") if file.is_file()}


def test_steps_of_3_workers_are_the_same_in_1_process(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(place / "run")
    (bad,) = [step for step in steps_of(place / "digits", "uniform", epochs=4) if step == 6]
    found = replayed(place, tmp_path, bad + 1, to=bad + 2, against=str(place / "run" / "samples"), show=16)
    assert mentions(found["notes"][-1], f"checkpoint_{bad:09d} 1 step"), "the bad step is left out again"
    assert contents(place / "run") == before, "nothing is written to the run"
    assert mentions(capsys.readouterr().out, f"step {bad + 2} as in {place}/run/samples")
    source = open_data(replace(SHORT, data=str(place / "digits"))).train
    rows = read_samples(RunFolder(str(place), "run")).to_pylist()
    pipeline = train_pipeline(SHORT)
    for step in found["steps"]:
        logged = [row for row in rows if row["step"] == step["step"]]
        assert step["loss"] == pytest.approx(logged[0]["loss"], rel=1e-12)
        samples = [batch | sample for batch in step["micro_batches"] for sample in batch["samples"]]
        for sample, row in zip(samples, logged, strict=True):
            assert [sample[name] for name in ("micro_batch", "rank", "id", "epoch")] == [
                row[name] for name in ("micro_batch", "rank", "id", "epoch")
            ]
            assert sample["path"] == source.path(row["id"])
            crops, flips = pipeline.draws(*(torch.tensor([row[name]]).numpy() for name in ("id", "epoch")))
            assert sample["draws"] == [crops[0].tolist(), flips[0].tolist()]
        assert step["gradient_norm"] == pytest.approx(
            sum(value**2 for value in step["gradients"].values()) ** 0.5, rel=1e-6
        )
        assert all(value > 0 for value in step["activations"].values()) and len(step["activations"]) > 5
    sheets = sorted(file.name for file in tmp_path.glob("*.png"))
    assert sheets == [f"step-{step:09d}-rank-{rank}.png" for step in (bad + 1, bad + 2) for rank in range(3)]
    with Image.open(tmp_path / sheets[0]) as sheet:
        assert sheet.width > 16 * 160, "16 pictures are beside each other"


def test_it_names_the_picture_whose_loss_is_not_finite(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (step, *_) = steps_of(place / "digits", "uniform")
    found = replayed(place, tmp_path, step)
    samples = [sample for batch in found["steps"][0]["micro_batches"] for sample in batch["samples"]]
    assert [sample["path"] for sample in samples if sample["loss"] == "nan"] == [f"{place}/digits/{PLANTED['uniform']}"]
    assert found["steps"][0]["loss"] == "nan" and mentions(capsys.readouterr().out, f"{step} nan uniform.png")


@pytest.mark.slow
def test_it_shows_the_mislabeled_picture_first(place: Path, tmp_path: Path) -> None:
    step = steps_of(place / "digits", "mislabeled", epochs=4)[-1]
    found = replayed(place, tmp_path, step)
    samples = [sample for batch in found["steps"][0]["micro_batches"] for sample in batch["samples"]]
    worst = max(samples, key=lambda sample: float(sample["loss"]))
    data = open_data(replace(SHORT, data=str(place / "digits")))
    assert worst["id"] == id_of(data.train, "mislabeled")
    assert step > 10, "the network has learned something by then"


@pytest.mark.slow
def test_a_trace_that_differs_is_told(place: Path, tmp_path: Path) -> None:
    copy = copied(place, tmp_path)
    for file in (copy / "run" / "samples").glob("*rank-00002*"):
        table = parquet.read_table(file)
        parquet.write_table(table.set_column(4, "id", pc.add(table["id"], 1)), file)
    with pytest.raises(CommandError, match=mentioning("step 7 micro-batch 2")):
        replayed(copy, tmp_path / "out", 7, against=str(copy / "run" / "samples"))


def copied(place: Path, path: Path) -> Path:
    """A copy of the run, its job and its data, to change them."""
    shutil.copytree(place, path / "copy", symlinks=True)
    config = path / "copy" / "run" / "config.json"
    config.write_text(config.read_text().replace(str(place / "digits"), str(path / "copy" / "digits")))
    return path / "copy"


@pytest.mark.slow
def test_a_run_whose_weights_were_sharded_is_replayed_whole(place: Path, tmp_path: Path) -> None:
    config = (copy := copied(place, tmp_path)) / "run" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"shard": 3, "on_bad_loss": "warn"}))
    found = replayed(copy, tmp_path / "whole", 7)
    assert not found["failed"] and "loss" in found["steps"][0]


@pytest.mark.slow
def test_without_a_checkpoint_before_the_step_the_nearest_one_is_used(place: Path, tmp_path: Path) -> None:
    copy = copied(place, tmp_path)
    kept = sorted(int(file.name.rpartition("_")[2]) for file in (copy / "run").glob("checkpoint_*"))
    found = replayed(copy, tmp_path / "near", kept[0] - 1)
    assert found["steps"][0]["loss"] > 0 and mentions(found["notes"][-1], f"checkpoint_{kept[0]:09d} {kept[0] - 1}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 20}, "--step 20 0 19"),
        ({"step": -1}, "--step 0 -1"),
        ({"step": 3, "show": 0}, "--show 1 0"),
        ({"step": 3, "to": 2}, "--step 3 --to 2"),
        ({"step": 3, "to": 99}, "--step 3 --to 99 19"),
        ({"step": 3, "against": "/nowhere"}, "--against /nowhere samples/"),
        ({"step": 3, "device": "7"}, "--device 7"),
        ({"step": 3, "output": "{place}/run/replay"}, "--output {place}/run/replay"),
        ({"step": 3, "output": "/proc/replay"}, "--output /proc/replay"),
        ({"step": 3, "output": "/proc/1"}, "--output /proc/1"),
        ({"step": 3, "output": "s3://bucket/replay"}, "--output s3://bucket/replay local"),
    ],
)
def test_refusals(place: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"job": str(place / "my_imagenet.py"), "output": str(tmp_path), **options}
    given["output"] = given["output"].format(place=place)
    with pytest.raises(UsageError, match=mentioning(message.format(place=place))):
        replay.main(Replay(run=str(place / "run"), **given))


@pytest.mark.slow
def test_without_the_data_the_ids_are_shown(place: Path, tmp_path: Path) -> None:
    copy = copied(place, tmp_path)
    (copy / "digits").rename(copy / "elsewhere")
    with pytest.raises(CommandError, match=mentioning(f"ids {copy}/digits")):
        replayed(copy, tmp_path / "ids", 4, against=str(copy / "run" / "samples"))
    found = json.loads((tmp_path / "ids" / "replay.json").read_text())
    ids = [sample["id"] for batch in found["steps"][0]["micro_batches"] for sample in batch["samples"]]
    assert ids == [row["id"] for row in read_samples(RunFolder(str(copy), "run")).to_pylist() if row["step"] == 4]
    again = replayed(copy, tmp_path / "data", 4, data=str(copy / "elsewhere"))
    assert again["steps"][0]["loss"] > 0 and not again["failed"]


@pytest.mark.slow
def test_files_that_changed_are_told_and_other_data_are_refused(place: Path, tmp_path: Path) -> None:
    copy = copied(place, tmp_path)
    run, train = RunFolder(str(copy), "run"), open_data(replace(SHORT, data=str(copy / "digits"))).train
    write_contents(run, check_contents(run, train))
    Image.new("RGB", (40, 40)).save(copy / "digits" / PLANTED["mislabeled"])
    notes = replayed(copy, tmp_path / "told", 7)["notes"]
    assert mentions(notes[0], "1 481 mislabeled.png")
    (copy / "digits" / PLANTED["mislabeled"]).unlink()
    with pytest.raises(CommandError, match=mentioning("ids 480 481 --data")):
        replayed(copy, tmp_path / "fewer", 4)


@pytest.mark.slow
def test_a_job_and_a_pytorch_that_have_changed_are_told(place: Path, tmp_path: Path) -> None:
    copy = copied(place, tmp_path)
    job, events = copy / "my_imagenet.py", copy / "run" / "events.jsonl"
    job.write_text(f"{job.read_text()}# changed\n")
    events.write_text(events.read_text().replace('"versions": {}', '"versions": {"torch": "1.0.0"}'))
    settings = json.loads((copy / "run" / "config.json").read_text())
    assert settings["batch_size"] == 16
    (copy / "run" / "config.json").write_text(json.dumps(settings | {"batch_size": 8, "order_batch_size": 16}))
    notes = replayed(copy, tmp_path / "told", 4)["notes"]
    assert mentions(notes[0], "my_imagenet.py changed") and mentions(notes[1], f"1.0.0 {versions()['torch']}")
    assert mentions(notes[2], "micro-batches 16 8")
    job.write_text(
        job.read_text().replace(
            "raydali.build_classifier(config.model, classes", "raydali.build_classifier(config.model, 7"
        )
    )
    with pytest.raises(CommandError, match=mentioning("ids files")):
        replayed(copy, tmp_path / "ids", 4)
    found = json.loads((tmp_path / "ids" / "replay.json").read_text())
    assert found["steps"][0]["micro_batches"][0]["samples"][0]["path"].startswith(str(copy / "digits"))


def sheet_of(*inputs: torch.Tensor) -> set[tuple[int, ...]]:
    """The colours of a sheet of one sample."""
    samples = [{"id": 0, "loss": 1.0, "path": ""}]
    row = {"micro_batch": 0, "loss": 1.0, "samples": samples, "tensors": {}, "inputs": [each[None] for each in inputs]}
    sheet = replay_sheet("title", [], [row], (), 1)
    assert sheet is not None
    return colours(BytesIO(sheet))


def colours(sheet: Any) -> set[tuple[int, ...]]:
    with Image.open(sheet) as image:
        return {*map(tuple, np.asarray(image.convert("RGB")).reshape(-1, 3).tolist())}


@pytest.mark.slow
def test_what_is_not_finite_and_what_is_no_level_can_be_seen() -> None:
    magenta, class_1 = (255, 0, 255), (128, 0, 0)
    levels, shares = torch.full((3, 32, 32), 7.0), torch.linspace(0, 1, 1024).reshape(1, 32, 32)
    damaged = shares.clone()
    damaged[0, :9, :9] = torch.nan
    assert (7, 7, 7) in sheet_of(levels) and (128, 128, 128) in sheet_of(shares.expand(3, 32, 32) - 0.5)
    assert magenta in sheet_of(levels, damaged) and magenta not in sheet_of(levels, shares)
    assert class_1 in sheet_of(levels, shares.round()) and class_1 not in sheet_of(levels, shares)
    assert magenta in sheet_of(torch.full((3, 32, 32), torch.inf))


BY_AREA = {
    "raydali.detection_loss(detector)": "by_area(raydali.detection_loss(detector))",
    "def build_model(": """def by_area(loss):
    def weighted(images, boxes, labels):
        areas = (boxes[..., 2:] - boxes[..., :2]).round().prod(-1)[labels > 0]
        return loss(images, boxes, labels) * (1 + (1 / areas).sum())

    return weighted


def build_model(""",
}
"""Changes of jobs/detection.py: a box that is narrower than half a pixel has no area, and its loss is infinite."""
BY_PIXEL = {
    "raydali.TrainMasks:": "Weighted:",
    "return raydali.TrainMasks(": "return Weighted(",
    'batch["images"], batch["masks"])': 'batch["images"], batch["masks"], batch["weights"])',
    'loss(images: "torch.Tensor", masks: "torch.Tensor")': "loss(images, masks, shares)",
    'raydali.segmentation_loss(trained(images), masks, weights, config.auxiliary, dice=config.loss == "dice")': (
        '(torch.nn.functional.cross_entropy(trained(images)[0], masks[:, 0].long() % 255, reduction="none")'
        " * shares[:, 0]).mean()"
    ),
    "def build_model(": """class Weighted(raydali.TrainMasks):
    @property
    def outputs(self):
        return (*super().outputs, "weights")

    def inputs(self, source, samples):
        import numpy as np

        names = (source.targets.path(id).replace("/masks/", "/weights/") for id in samples.ids.tolist())
        weights = np.stack([np.load(name.replace(".png", ".npy")) for name in names])
        return *super().inputs(source, samples), weights


def build_model(""",
}
"""Changes of jobs/segmentation.py: each image has a float mask of weights besides."""


def narrow_box(place: Path) -> dict[str, Any]:
    """Options of detection on the built-in shapes, of which one has a box of 0.2 pixels."""
    shapes, planted = Path(shapes_folder()), place / "planted.json"
    contents = json.loads((shapes / "annotations" / "instances_train.json").read_text())
    next(each for each in contents["annotations"] if each["image_id"] == contents["images"][5]["id"])["bbox"][2] = 0.2
    planted.write_text(json.dumps(contents))
    val = {"val_data": f"{shapes}/val", "val_annotations": f"{shapes}/annotations/instances_val.json"}
    return {"root": shapes / "train", "annotations": str(planted), "image_size": 64, "crop_probability": 0.0, **val}


def damaged_mask(place: Path) -> dict[str, Any]:
    """Options of segmentation on the built-in shapes, whose float masks have NaN in one."""
    root = place / "shapes"
    shutil.copytree(masked_shapes_folder(), root)
    (root / "train" / "weights").mkdir()
    for mask in (root / "train" / "masks").iterdir():
        weights = np.ones((1, 64, 64), np.float32)
        weights[0, :9, :9] = np.nan if mask.stem == "0005" else 0.5
        np.save(root / "train" / "weights" / f"{mask.stem}.npy", weights)
    sizes = {"crop_size": 64, "base_size": 80, "val_size": (160, 160)}
    return {"root": root, "classes": f"{root}/classes.txt", **sizes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "options_of", "loss", "colour"),
    [
        ("detection", BY_AREA, narrow_box, "inf", (0, 255, 0)),
        ("segmentation", BY_PIXEL, damaged_mask, "nan", (255, 0, 255)),
    ],
)
def test_a_box_and_a_float_mask_that_spoil_a_loss_are_shown(
    name: str, changes: dict[str, str], options_of: Any, loss: str, colour: tuple[int, ...], tmp_path: Path
) -> None:
    options = {"epochs": 1, "batch_size": 10, "global_batch_size": 20, "precision": "fp32", **options_of(tmp_path)}
    job = changed_copy(name, changes, tmp_path)
    (((row,), _), _) = planted_run(job, storage=tmp_path, workers=2, on_bad_loss="skip", **options)
    assert loss in row["why"]
    found = replayed(tmp_path, tmp_path / "out", row["step"], job=str(job))
    batches = found["steps"][0]["micro_batches"]
    ((rank, path),) = [
        (batch["rank"], sample["path"]) for batch in batches for sample in batch["samples"] if sample["loss"] == loss
    ]
    assert "/0005." in path and colour in colours(tmp_path / "out" / f"step-{row['step']:09d}-rank-{rank}.png")
    assert len(batches) == 2


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(place: Path, tmp_path: Path) -> None:
    copy = copied(place, tmp_path)
    *_, before, newest, _ = sorted((copy / "run").glob("checkpoint_*"))
    (newest / "state.pt").write_bytes(b"")
    with pytest.raises(CommandError, match=mentioning(f"{newest} damaged 0 bytes")):
        replayed(copy, tmp_path / "damaged", 19)
    newest.rename(tmp_path / "away")
    assert mentions(replayed(copy, tmp_path / "before", 19)["notes"][-1], before.name)


TASKS: dict[str, dict[str, Any]] = {
    "detection": {"image_size": 64},
    "restoration": {"channels": 8, "blocks": 1, "crop_size": 16},
    "segmentation": {"crop_size": 32, "base_size": 40},
    "video": {"sequence_length": 4},
}


def _train(file: Path, run: RunFolder, **options: Any) -> None:
    job, config, data = opened(file, **options)
    job.train(config, data, LocalSession(run, stop_at=3))


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_each_task_is_drawn(name: str, tmp_path: Path) -> None:
    options = {"epochs": 1, "batch_size": 4, "global_batch_size": 16, "checkpoint_every": 1, **TASKS[name]}
    file = changed_copy(name, {}, tmp_path)
    run = begun(*opened(file, **options), tmp_path)
    with pytest.raises(Stopped):
        run_ranks(1, partial(_train, trace_samples=True, **options), file, run)
    replay.main(
        Replay(
            run=str(run), step=1, job=str(file), output=str(tmp_path / "out"), device="cpu", against=f"{run}/samples"
        )
    )
    found = json.loads((tmp_path / "out" / "replay.json").read_text())
    rows = read_samples(run).to_pylist()
    assert found["steps"][0]["loss"] == pytest.approx(next(row["loss"] for row in rows if row["step"] == 1), rel=1e-3)
    assert all(sample["loss"] > 0 for batch in found["steps"][0]["micro_batches"] for sample in batch["samples"])
    assert (tmp_path / "out" / "step-000000001-rank-0.png").exists()
