"""The segmentation job on plain gloo processes: the same on any ranks and across a cut, and it learns the shapes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from jobs import segmentation
from jobs.segmentation import JOB, SHAPES, Config, open_data, train
from raydali.commands import evaluate
from raydali.commands.evaluate import Evaluate
from raydali.data.builtin.shapes import masked_shapes_folder
from raydali.errors import UsageError
from raydali.inference.task_results.segmentation import colour_of
from raydali.inference.trained_run import open_run
from raydali.launch.driver.command import parse
from raydali.launch.driver.launcher import launch
from raydali.report.console import Console
from tests.data.index.test_masked_images import folders, grey
from tests.inference.test_task_results import evaluated, predicted
from tests.support.job_ranks import train_rank, train_rank_in_double
from tests.support.messages import mentioning
from tests.support.ranks import Stopped, folder_of, run_ranks
from tests.support.traces import assert_whole
from tests.support.trained_runs import dealt_to, made_run

# Six micro-batches a global batch: 1, 2 and 3 workers share them evenly.
CONFIG = replace(
    SHAPES,
    crop_size=32,
    base_size=40,
    epochs=1,
    batch_size=8,
    global_batch_size=48,
    optimizer="sgd",
    learning_rate=0.05,
    jitter=0.2,
    loss="dice",
    class_weights="balanced",
    ceiling=False,
    trace_samples=True,
)
NAMES = ["background", "disc", "rectangle", "triangle"]
in_double = partial(train_rank_in_double, train)


@pytest.mark.slow
def test_weights_and_figures_do_not_depend_on_ranks_or_cuts(tmp_path: Path) -> None:
    data, folders = open_data(CONFIG), {name: folder_of(tmp_path, name) for name in ("one", "two", "three")}
    weights = run_ranks(1, in_double, CONFIG, data, folders["one"])[0]
    run_ranks(2, in_double, CONFIG, data, folders["two"])
    with pytest.raises(Stopped):
        run_ranks(2, in_double, replace(CONFIG, checkpoint_every=2), data, folders["three"], 3)
    others = run_ranks(3, in_double, CONFIG, data, folders["three"])[0]
    for name, tensor in weights.items():
        np.testing.assert_allclose(others[name], tensor, rtol=1e-6, atol=1e-8, err_msg=name)
    rows = {name: folder.rows("epochs.jsonl") for name, folder in folders.items()}
    for name, folder in folders.items():
        assert_whole(folder, CONFIG.stream(300))
        (row,), (first,) = rows[name], rows["one"]
        assert row["validation"]["images"] == 60
        for figure in ("iou", "accuracy", "loss"):
            assert row["validation"][figure] == pytest.approx(first["validation"][figure], rel=1e-6)


@pytest.mark.slow
def test_the_demo_finds_the_shapes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    config = replace(SHAPES, global_batch_size=8, ceiling=False)
    run_ranks(1, partial(train_rank, train), config, open_data(config), folder)
    last = folder.rows("epochs.jsonl")[-1]["validation"]
    assert last["accuracy"] > 0.94 and last["iou"] > 0.65


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return made_run(tmp_path_factory.mktemp("runs"), segmentation, SHAPES, NAMES)


@pytest.mark.parametrize("workers", [[2], pytest.param([1, 2, 3], marks=pytest.mark.slow)], ids=str)
def test_one_checkpoint_has_the_same_figures_on_any_number_of_workers(run: Any, workers: list[int]) -> None:
    found = evaluated(run, workers, batch_size=4)
    assert found["samples"] == 60 and {*found["metrics"]} == {"images", "iou", "accuracy", "loss"}
    rows = found["classes"]
    assert [row["class"] for row in rows] == NAMES
    known = [row["iou"] for row in rows if row["iou"] is not None]
    assert np.mean(known) == pytest.approx(found["metrics"]["iou"], abs=1e-6)
    data = open_data(SHAPES)
    pixels = np.sum([np.bincount(data.val.mask(id).ravel(), minlength=4) for id in range(60)], 0)
    assert [row["pixels"] for row in rows] == pixels.tolist()
    worst = [float(each["predicted"].split()[1]) for each in found["worst"]]
    assert len(worst) == 60 and worst == sorted(worst)


def with_palette(root: Path, colours: int) -> str:
    """Write images whose masks have the values 0 and 1, and a palette of so many colours."""
    mask = grey(1).convert("P")
    mask.putpalette([*range(3 * colours)])
    return folders(root, mask)


def test_classes_of_other_data_are_found_by_name(tmp_path: Path) -> None:
    """A run of four classes on masks of two: predictions of the others are wrong, by IoU counted here."""
    run = made_run(tmp_path, segmentation, SHAPES, ["3", "1", "0", "2"], seed=6)
    two = with_palette(tmp_path / "two", 2)
    with dealt_to(1):
        evaluate.main(Evaluate(run=str(run), data=two))
    found = run.read_json("evaluation.json")
    opened = open_run(str(run))
    network, places = opened.network(4), np.array([2, 1])
    val = open_data(replace(SHAPES, data=two)).val
    union, right = np.zeros(4), np.zeros(4)
    for id in range(len(val)):
        truth = places[val.mask(id)]
        with torch.inference_mode():
            scores = network(opened.pipeline.sample(val, id, 0)[0][None])[0]
        predicted = scores.argmax(0).numpy()[: truth.shape[0], : truth.shape[1]]
        for place in range(4):
            union[place] += ((truth == place) | (predicted == place)).sum()
            right[place] += ((truth == place) & (predicted == place)).sum()
    assert found["metrics"]["iou"] == pytest.approx((right[union > 0] / union[union > 0]).mean())
    assert union[3] > 100 and found["samples"] == 2
    pixels = {row["class"]: row["pixels"] for row in found["classes"]}
    assert pixels == {"3": 0, "1": 2 * 20 * 30, "0": 2 * 20 * 30, "2": 0}


def test_other_classes_are_refused(run: Any, tmp_path: Path) -> None:
    numbered = made_run(tmp_path, segmentation, SHAPES, [*map(str, range(4))], name="numbered")
    six = with_palette(tmp_path / "six", 6)
    for each, named in ((run, "six '0' '1'"), (numbered, "six '4' '5'")):
        with pytest.raises(UsageError, match=mentioning(named)):
            evaluate.main(Evaluate(run=str(each), data=six))


def test_predictions_are_masks_of_the_size_of_their_images(run: Any, tmp_path: Path) -> None:
    (images := tmp_path / "images").mkdir()
    for path in sorted(Path(masked_shapes_folder(), "val/images").glob("*.jpg"))[:5]:
        (images / path.name).symlink_to(path)
    output = predicted(run, images, tmp_path / "masks", overlays=True)
    made = sorted(output.glob("*.png"))
    assert len(made) == len([*output.glob("*.overlay.jpg")]) == 5
    for path in made:
        with Image.open(path) as mask, Image.open(images / f"{path.stem}.jpg") as image:
            assert mask.size == image.size and mask.mode == "L" and set(np.unique(np.asarray(mask))) <= {0, 1, 2, 3}
            classes, pixels = np.asarray(mask), np.asarray(image)
    with Image.open(path.with_suffix(".overlay.jpg")) as overlay:
        mixed = np.where(classes[..., None] > 0, pixels // 2 + colour_of(classes) // 2, pixels)
        assert np.abs(np.asarray(overlay).astype(int) - mixed).mean() < 10  # a JPEG of noise


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--classes 3", "--classes 3 --data"),
        ("--data x.csv --val-data y.csv --model deeplab", "--model deeplab deeplabv3_resnet50"),
        ("--data . --loss dic", "--loss dice"),
        ("--data . --crop-size 0", "canvas at least 1"),
        ("--data . --scales 2 1", "scales low high"),
        ("--data . --ignore-index 70000", "--ignore-index at most 65535"),
    ],
)
def test_bad_usage_is_refused(arguments: str, message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        JOB.check(parse(Config, arguments.split(), "segmentation.py"))


def test_masks_of_which_one_class_would_be_trained_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for kind, pixels in (("images", np.zeros((30, 40, 3), np.uint8)), ("masks", np.eye(30, 40, dtype=np.uint8) * 255)):
        (tmp_path / "data" / kind).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(pixels).save(tmp_path / "data" / kind / f"{i}.png")
    config = Config(data=str(tmp_path / "data"), classes="2", storage=str(tmp_path / "runs"), batch_size=1, workers="1")
    with pytest.raises(UsageError, match=mentioning("'0' 3 masks --mask-values 0 255")):
        launch(JOB, config, Console())
    assert not (tmp_path / "runs").exists()
