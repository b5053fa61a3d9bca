"""jobs/video.py on plain gloo processes: clips keep the stream's promises, and the demo learns."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jobs.video import DISCS, Config, Data, build_model, open_data, train
from raydali.data.builtin.moving_discs import moving_discs_folder
from raydali.errors import UsageError
from raydali.training.models.classification import build_video_model, check_video_model
from raydali.training.weights.matching import match
from raydali.training.weights.reading import read_weights
from tests.support.digits import every_third
from tests.support.job_ranks import train_rank, train_rank_in_double
from tests.support.messages import mentioning
from tests.support.ranks import Stopped, folder_of, run_ranks
from tests.support.traces import assert_whole

# Three micro-batches a global batch: 2 workers share them unevenly.
CONFIG = replace(
    DISCS, ceiling=False, epochs=1, batch_size=8, global_batch_size=24, trace_samples=True, checkpoint_every=2
)


@pytest.fixture(scope="module")
def discs() -> Data:
    return open_data(DISCS)


in_single = partial(train_rank, train)
in_double = partial(train_rank_in_double, train)


@pytest.mark.slow
def test_a_run_resumed_on_other_workers_equals_the_undisturbed(tmp_path: Path) -> None:
    folder, whole = folder_of(tmp_path, "cut"), folder_of(tmp_path, "whole")
    data = open_data(replace(DISCS, data=str(every_third(moving_discs_folder(), tmp_path / "discs"))))
    with pytest.raises(Stopped):
        run_ranks(2, in_double, CONFIG, data, folder, 3)  # checkpoint at 2; step 2 runs again
    weights = run_ranks(1, in_double, CONFIG, data, folder)[0]
    undisturbed = run_ranks(1, in_double, replace(CONFIG, decoders=2), data, whole)[0]

    stream = CONFIG.stream(len(data.train))
    for run in (folder, whole):
        assert_whole(run, stream)
    rows = [run.rows("epochs.jsonl") for run in (folder, whole)]
    for row, other in zip(*rows, strict=True):
        assert row["images"] == other["images"] and row["validation"]["images"] == 27
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert row["validation"]["loss"] == pytest.approx(other["validation"]["loss"], rel=1e-6)
    for name, tensor in weights.items():
        np.testing.assert_allclose(tensor, undisturbed[name], rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.slow
def test_the_demo_learns_where_discs_move_to(tmp_path: Path, discs: Data) -> None:
    folder = folder_of(tmp_path)
    run_ranks(2, in_single, replace(DISCS, global_batch_size=32, epochs=3), discs, folder)
    rows = folder.rows("epochs.jsonl")
    assert rows[-1]["validation"]["top1"] > 0.9  # of four directions
    assert rows[-1]["ceiling_images_per_second"] > 0


def test_models_by_name() -> None:
    check_video_model("clips", 1, 8)
    check_video_model("r2plus1d_18", 8, 112)
    check_video_model("mvit_v2_s", 16, 224)
    assert [tuple(p.shape) for p in build_video_model("r3d_18", 7).parameters()][-1] == (7,)
    with pytest.raises(UsageError, match=mentioning("--model r2plus1d_19 r2plus1d_18")):
        check_video_model("r2plus1d_19", 16, 112)
    with pytest.raises(UsageError, match=mentioning("mvit_v2_s 8 112x112 --sequence-length 16")):
        check_video_model("mvit_v2_s", 8, 112)


@pytest.mark.slow
def test_fine_tuning_starts_from_the_weights_and_freezes(tmp_path: Path, discs: Data) -> None:
    torch.manual_seed(7)
    file = tmp_path / "clips.safetensors"
    save_file(build_video_model("clips", 7).state_dict(), file)
    config = replace(CONFIG, freeze=r"[01]\.", layer_decay=0.8, head_lr_scale=3.0)
    weights = match(read_weights(str(file), "clips"), partial(build_model, config), 4, discs.train.videos.classes)
    assert set(weights.new_head) == {"11.weight", "11.bias"} and weights.earlier_classes == 7
    trained = run_ranks(1, in_single, config, discs, folder_of(tmp_path), None, weights)[0]
    for name, value in weights.state.items():
        assert np.array_equal(trained[name], value.numpy()) is (name.split(".")[0] in ("0", "1")), name


@pytest.mark.parametrize("model", ["r2plus1d_18", pytest.param("mvit_v2_s", marks=pytest.mark.slow)])
def test_published_weights_get_a_head_for_the_videos(model: str, tmp_path: Path) -> None:
    torch.save(build_video_model(model, 400).state_dict(), tmp_path / "kinetics.pth")
    config = Config(data="/videos", model=model)
    weights = match(read_weights(str(tmp_path / "kinetics.pth"), model), partial(build_model, config), 5)
    assert weights.earlier_classes == 400 and len(weights.new_head) == 2 and not weights.missing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_data": "/val"}, "--val-data /val --data"),
        ({"sequence_length": 0}, "--sequence-length 1 0"),
        ({"step": -1}, "--step 1 -1"),
        ({"decoders": 0}, "--decoders 1 0"),
        ({"label_smoothing": 1.0}, "--label-smoothing 0 1 1.0"),
    ],
)
def test_options_out_of_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        Config(**options)
