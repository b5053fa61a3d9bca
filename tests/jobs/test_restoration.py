"""The restoration job on plain gloo processes: the same on any ranks and across a cut, and better than its input."""

import io
import re
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from jobs.restoration import BLURRED, JOB, Config, Data, train
from raydali.data.builtin.blurred import blurred_folder
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.stream.permutation import Permutation
from raydali.errors import UsageError
from raydali.launch.driver.command import parse
from raydali.report.comparison_grid import ROWS_SHOWN, draw
from tests.support.job_ranks import train_rank, train_rank_in_double
from tests.support.pictures import photograph
from tests.support.ranks import Stopped, folder_of, run_ranks
from tests.support.traces import assert_whole
from tests.support.trees import grow

# Six micro-batches a global batch: 1, 2 and 3 workers share them evenly, 4 do not. An epoch is 3 1/3 steps.
CONFIG = Config(
    data="elsewhere",
    crop_size=16,
    test_size=(24, 32),
    channels=8,
    blocks=1,
    epochs=2,
    batch_size=2,
    global_batch_size=12,
    precision="fp32",
    ceiling=False,
    trace_samples=True,
)
TRAINED, TESTED = 40, 9
DRAWING_SECONDS = 3.0


def write_pair(root: Path, name: str, size: tuple[int, int], seed: int) -> None:
    left, top = np.random.default_rng(seed).integers(0, 300, 2).tolist()
    sharp = photograph("china").crop((left, top, left + size[0], top + size[1]))
    blurred = sharp.reduce(2).resize(size, Image.Resampling.BILINEAR)
    for folder, image in (("img", blurred), ("gt", sharp)):
        (root / folder / "scene").mkdir(parents=True, exist_ok=True)
        image.save(root / folder / "scene" / f"{name}.png")


def write_pairs(root: Path) -> Path:
    for split, count in (("train", TRAINED), ("test", TESTED)):
        for i in range(count):
            write_pair(root / split, f"{i:02}", (32 + i, 40 - i % 5), seed=i)
    return root


def scanned(root: Path | str) -> Data:
    return Data(ImagePairs.scan(f"{root}/train"), ImagePairs.scan(f"{root}/test"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return scanned(write_pairs(tmp_path_factory.mktemp("pairs")))


in_single = partial(train_rank, train)
in_double = partial(train_rank_in_double, train)


def test_weights_and_figures_do_not_depend_on_ranks_or_cuts(tmp_path: Path, pairs: Data) -> None:
    alone, cut = folder_of(tmp_path, "alone"), folder_of(tmp_path, "cut")
    weights = run_ranks(1, in_double, CONFIG, pairs, alone)[0]
    config = replace(CONFIG, checkpoint_every=2)
    with pytest.raises(Stopped):
        run_ranks(2, in_double, config, pairs, cut, 3)  # a checkpoint at 2; step 2 runs again
    others = run_ranks(3, in_double, config, pairs, cut)[0]

    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        np.testing.assert_allclose(others[name], tensor, rtol=1e-7, atol=1e-9, err_msg=name)
    for folder in (alone, cut):
        assert_whole(folder, CONFIG.stream(TRAINED))
    rows, other_rows = alone.rows("epochs.jsonl"), cut.rows("epochs.jsonl")
    assert [row["images"] for row in rows] == [row["images"] for row in other_rows] == [48, 24]
    for row, other in zip(rows, other_rows, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert set(row["validation"]) == {"images", "broken", "loss", "psnr", "ssim", "input_psnr", "seconds"}
        assert row["validation"]["images"] == other["validation"]["images"] == TESTED
        for name in ("loss", "psnr", "ssim", "input_psnr"):
            assert row["validation"][name] == pytest.approx(other["validation"][name], rel=1e-5)


@pytest.mark.slow
def test_a_short_demo_beats_its_input_and_draws_it(tmp_path: Path) -> None:
    config = replace(BLURRED, epochs=3, global_batch_size=4, crop_size=32, channels=32, ceiling=False)
    folder = folder_of(tmp_path)
    data = scanned(blurred_folder())
    # Each node finds the photographs in a place of its own.
    elsewhere = Data(data.train.relocate("/nowhere"), data.val.relocate("/nowhere"))
    run_ranks(1, in_single, config, elsewhere, folder)
    *_, validation = [row["validation"] for row in folder.rows("epochs.jsonl")]
    assert validation["images"] == 45
    assert validation["psnr"] > validation["input_psnr"] + 1
    assert validation["ssim"] > 0.85
    sheet = Image.open(io.BytesIO(folder.read("samples.png")))
    assert sheet.width > 3 * 192 and sheet.height > ROWS_SHOWN * 192


@pytest.mark.slow
def test_unusable_pairs_are_left_out_and_too_many_end_the_run(tmp_path: Path) -> None:
    root = write_pairs(tmp_path / "pairs")
    (root / "test/gt/scene/03.png").write_bytes(b"no image")
    folder = folder_of(tmp_path)
    run_ranks(2, in_single, replace(CONFIG, epochs=1), scanned(root), folder)
    for row in folder.rows("epochs.jsonl"):
        assert row["validation"]["images"] == TESTED - 1 and row["validation"]["broken"] == 1
    (root / "test/img/scene/05.png").unlink()
    (root / "test/img/scene/05.png").symlink_to("/nowhere")
    message = rf"{root}/test.*gt/scene/03.png: cannot identify(.|\n)*2 of 9 validation samples are broken, but --max"
    with pytest.raises(AssertionError, match=message):
        run_ranks(2, in_single, CONFIG, scanned(root), folder_of(tmp_path, "many"))


def test_where_none_of_those_shown_can_be_read_nothing_is_drawn(tmp_path: Path) -> None:
    root, folder = write_pairs(tmp_path / "pairs"), folder_of(tmp_path)
    for id in Permutation(TESTED, seed=0, epoch=0)(range(ROWS_SHOWN)):
        (root / f"test/gt/scene/{id:02}.png").write_bytes(b"no image")
    run_ranks(1, in_single, replace(CONFIG, epochs=1, max_bad_fraction=0.9), scanned(root), folder)
    (row,) = folder.rows("epochs.jsonl")
    assert (row["validation"]["images"], row["validation"]["broken"]) == (TESTED - ROWS_SHOWN, ROWS_SHOWN)
    assert not folder.exists("samples.png")


def drawing_slowly(*args: Any) -> None:
    def slow_draw(*images: torch.Tensor) -> bytes:
        time.sleep(DRAWING_SECONDS)
        return draw(*images)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raydali.report.comparison_grid.draw", slow_draw)
        in_single(*args)


@pytest.mark.slow
def test_drawing_is_a_part_of_validation_on_all_ranks(tmp_path: Path, pairs: Data) -> None:
    folder = folder_of(tmp_path)
    run_ranks(2, drawing_slowly, replace(CONFIG, epochs=1), pairs, folder)
    (row,) = folder.rows("epochs.jsonl")
    assert row["validation"]["seconds"] > DRAWING_SECONDS
    for rank in row["ranks"]:
        accounted = rank["loader_wait_seconds"] + rank["step_seconds"] + rank["checkpoint_seconds"]
        assert rank["seconds"] - accounted < DRAWING_SECONDS / 2


USAGE = {
    "no-test": (["train/img/1.png", "train/gt/1.png"], "--data {root}/", "{root}/test/img does not exist"),
    "crop": ([], "--crop-size 0", "--crop-size must be at least 1, not 0"),
    "test-size": ([], "--test-size 8 64", "--test-size must be at least 11.*8, 64"),
    "channels": ([], "--channels 0", "--channels must be at least 1, not 0"),
    "blocks": ([], "--blocks -1", "--blocks must be at least 0, not -1"),
}


@pytest.mark.parametrize("case", USAGE)
def test_bad_usage_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    files, arguments, message = USAGE[case]
    root = grow(tmp_path, files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["restoration.py", *arguments.format(root=root).split()])
    with pytest.raises(UsageError, match=message.format(root=re.escape(str(root)))):
        config = parse(Config, demo=BLURRED)
        JOB.check(config)
        JOB.open_data(config)
