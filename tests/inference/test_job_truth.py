"""What a copied job says is what its run and all commands compute; a job that says otherwise is refused by each."""

import csv
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
from torch import nn

from raydali.commands import evaluate, export, predict
from raydali.commands.evaluate import Evaluate
from raydali.commands.export import Export
from raydali.commands.predict import Predict
from raydali.errors import CommandError
from raydali.inference.check import OUTPUT_LIMIT
from raydali.inference.trained_run import open_run
from raydali.run.folder import RunFolder
from raydali.run.model_file import BEST_REFERENCE
from raydali.training.evaluation.reference import Reference, raw_outputs
from raydali.training.models.classification import build_model
from raydali.training.models.normalized import Normalized
from tests.support.copied_jobs import Changes, changed_copy, trained_copy
from tests.support.digits import few_digits
from tests.support.messages import mentioning, mentions
from tests.support.ranks import Stopped
from tests.support.trained_runs import dealt_to

RECORDED = Path(__file__).parent / "recorded_run"
SHORT: dict[str, dict[str, Any]] = {
    "imagenet": {"epochs": 1, "batch_size": 16, "global_batch_size": 48, "warmup_epochs": 0.2},
    "detection": {"epochs": 1, "image_size": 64, "batch_size": 4, "global_batch_size": 48},
    "restoration": {"epochs": 1, "channels": 8, "blocks": 1, "crop_size": 16, "batch_size": 4, "global_batch_size": 32},
    "segmentation": {"epochs": 1, "crop_size": 32, "base_size": 40, "batch_size": 4, "global_batch_size": 48},
    "video": {"epochs": 1, "batch_size": 16, "global_batch_size": 64, "sequence_length": 4},
}
OF_MINE = """def mine(train, val):
    {body}


def build_model("""
INDEX = "    return Data(*raydali.exclude(config.exclude, *images))"
VALIDATE = "return raydali.evaluate_classifier(network, val.batches, val.worker, val.precision)"
RUN_INFERENCE = "evaluated = run.inference("
INFERENCE = "evaluated = run.inference(network(weights, config).to(device))"
WITH_LOADERS = "with run.loaders("
PASSED = "run.loaders(data, (train_pipeline(config), val_pipeline(config)))"


def with_data(body: str) -> Changes:
    """Another data set of a copy of jobs/imagenet.py."""
    mine = INDEX.replace("Data(", "mine(")
    return {INDEX: mine, "def build_model(": OF_MINE.format(body=body)}


AGREEING: dict[str, tuple[str, Changes]] = {
    "normalisation": ("imagenet", {"config.mean, config.std, mirrored": "(0.9, 0, 0), (1, 0.1, 0.1), mirrored"}),
    "average and flip": ("imagenet", {'config.tta == "flip"': "True"}),
    "filter": ("imagenet", with_data("return Data(train, val.drop(range(50, 90)))")),
    "split": (
        "imagenet",
        with_data(
            "held_out = {*range(0, len(train), 3)}\n"
            "    return Data(train.drop(held_out), train.drop({*range(len(train))} - held_out))"
        ),
    ),
    "pipeline": ("imagenet", {"resize_size=config.resize_size, **": "resize_size=38, **"}),
    "loss": ("imagenet", {"criterion(trained(images), labels)": "3 * criterion(trained(images), labels)"}),
    "evaluation": ("imagenet", {VALIDATE: f"return {{**{VALIDATE[7:]}, 'zero': 0.0}}"}),
    "boxes": ("detection", {"ValidationBoxes(image_size=config.image_size": "ValidationBoxes(image_size=80"}),
    "restored": ("restoration", {"mean=(0.0, 0.0, 0.0)": "mean=(0.1, 0.0, 0.0)"}),
    "masks": ("segmentation", {"canvas=config.val_size": "canvas=(170, 190)"}),
    "clips": ("video", {"config.std or raydali.KINETICS_STD": "(0.3, 0.3, 0.3)"}),
}
COMMANDS = {
    "imagenet": ("evaluate", "predict", "export"),
    "detection": ("evaluate", "predict"),
    "restoration": ("evaluate", "predict", "export"),
    "segmentation": ("evaluate", "predict", "export"),
    "video": ("evaluate", "predict"),
}
SWAPPED = """
    class Swapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network(weights, config)

        def forward(self, images):
            return self.network(images)[:, [1, 0, *range(2, classes)]]

    evaluated = run.inference(Swapped().to(device))"""
OTHER_MEAN = "evaluated = run.inference(raydali.Normalized(weights, (0.505, 0.456, 0.406), config.std).to(device))"
DISAGREEING: dict[str, tuple[str, Changes]] = {
    "a mean off by 0.02": ("imagenet", {INFERENCE: OTHER_MEAN}),
    "other weights": ("imagenet", {INFERENCE: INFERENCE.replace("weights", "build_model(config, classes)")}),
    "two classes": ("imagenet", {INFERENCE: SWAPPED}),
    "pipeline": (
        "imagenet",
        {PASSED: PASSED.replace("val_pipeline(config)", "raydali.ValidationImages(image_size=32)")},
    ),
    "boxes": ("detection", {WITH_LOADERS: f"detector.model.transform.normalized.shift += 0.09\n    {WITH_LOADERS}"}),
    "restored": ("restoration", {RUN_INFERENCE: f"trained.shift += 0.02\n    {RUN_INFERENCE}"}),
    "masks": ("segmentation", {RUN_INFERENCE: f"trained.shift += 0.09\n    {RUN_INFERENCE}"}),
    "clips": ("video", {RUN_INFERENCE: f"trained.shift += 0.09\n    {RUN_INFERENCE}"}),
}


QUICK = {"average and flip", "filter", "a mean off by 0.02"}
"""The cases of every commit; the others are for `make test-all`."""


def marked(cases: dict[str, tuple[str, Changes]]) -> list[Any]:
    return [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in cases]


@pytest.fixture(autouse=True)
def torch_is_restored() -> Any:
    """A run changes global settings of torch."""
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = benchmark
    for name in [name for name in sys.modules if name.startswith("raydali_job_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Every third of the digits: 120 of them validate."""
    root = tmp_path_factory.mktemp("digits")
    few_digits(root)
    return str(root)


def options_of(name: str, data: str) -> dict[str, Any]:
    return SHORT[name] | ({"data": data} if name == "imagenet" else {})


def command(name: str, job: str, run: RunFolder, file: Path, output: Path, **given: Any) -> None:
    """Run a command on a run of a copied job; prediction takes two of its validation samples."""
    common: dict[str, Any] = {"run": str(run), "job": str(file), "checkpoint": "newest", **given}
    if name == "evaluate":
        with dealt_to(1):
            evaluate.main(Evaluate(**common))
    elif name == "export":
        export.main(Export(**common, output=f"{output}.onnx", images=8))
    else:
        ending = "" if job in ("restoration", "segmentation") else ".csv"
        predict.main(Predict(**common, data=str(samples_of(run, file, output.parent)), output=f"{output}{ending}"))


def samples_of(run: RunFolder, file: Path, parent: Path) -> Path:
    folder = parent / "samples"
    if not folder.exists():
        folder.mkdir()
        val = open_run(str(run), "newest", str(file)).data.val
        source = getattr(val, "videos", getattr(val, "inputs", val))
        for id in range(2):
            (folder / Path(source.path(id)).name).write_bytes(source.read(id))
    return folder


@pytest.mark.parametrize("case", marked(AGREEING))
def test_a_copy_is_evaluated_as_its_run_measured(case: str, data: str, tmp_path: Path) -> None:
    name, changes = AGREEING[case]
    file = changed_copy(name, changes, tmp_path)
    options = options_of(name, data) | ({"ema_decay": 0.5} if case == "average and flip" else {})
    run = trained_copy(file, tmp_path, **options)
    command("evaluate", name, run, file, tmp_path / "e")
    found = run.read_json("evaluation.json")
    assert found["checked"].startswith("checked on 4 validation samples: files")
    row = run.rows("epochs.jsonl")[-1]["validation"]
    measured = {name: row[name] for name in row if name not in ("seconds", "broken")}
    assert len(measured) > 2
    assert {name: found["metrics"][name] for name in measured} == pytest.approx(measured, abs=1e-6, rel=1e-6)
    assert found["beside_run"] == "the same as the run measured in epoch 0"
    if case == "filter":
        assert found["samples"] == 120 - 40
    if case == "evaluation":
        assert found["metrics"]["zero"] == 0


@pytest.mark.parametrize("case", marked(DISAGREEING))
def test_a_copy_that_validates_something_else_is_refused(case: str, data: str, tmp_path: Path) -> None:
    name, changes = DISAGREEING[case]
    file = changed_copy(name, changes, tmp_path)
    run = trained_copy(file, tmp_path, **options_of(name, data))
    named = "val_pipeline" if case == "pipeline" else "network"
    for each in COMMANDS[name]:
        with pytest.raises(CommandError, match=mentioning(f"{named} train() --unchecked")):
            command(each, name, run, file, tmp_path / each)
        assert not [*tmp_path.glob(f"{each}.*")] and not run.exists("evaluation.json")


@pytest.mark.slow
def test_other_videos_are_cut_as_the_job_cuts_its_own(tmp_path: Path) -> None:
    file = changed_copy("video", {"stride=config.stride": "stride=1", "step=config.step": "step=5"}, tmp_path)
    run = trained_copy(file, tmp_path, **options_of("video", ""))
    command("predict", "video", run, file, tmp_path / "p")
    val = open_run(str(run), "newest", str(file)).data.val
    counts = np.bincount(val.places(np.arange(len(val)))[0])[:2]
    with (tmp_path / "p.csv").open(newline="") as lines:
        assert [int(row["clips"]) for row in csv.DictReader(lines)] == counts.tolist()
    assert counts.max() > 1


@pytest.mark.slow
def test_what_is_not_checked_says_so(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = changed_copy("imagenet", DISAGREEING["a mean off by 0.02"][1], tmp_path)
    run = trained_copy(file, tmp_path, **options_of("imagenet", data))
    for each in COMMANDS["imagenet"]:
        command(each, "imagenet", run, file, tmp_path / each, unchecked=True)
        assert "unchecked: " in capsys.readouterr().out
    assert run.read_json("evaluation.json")["checked"].startswith("unchecked: ")
    facts = {each.key: each.value for each in onnx.load(tmp_path / "export.onnx").metadata_props}
    assert facts["checked"].startswith("unchecked: ")


@pytest.mark.slow
def test_other_samples_than_train_validated(data: str, tmp_path: Path) -> None:
    """train() drops samples that open_data(config) has: only an evaluation of these is wrong."""
    run_begins = "run = raydali.TrainingRun(config"
    dropped = {run_begins: f"data = Data(data.train, data.val.drop(range(60)))\n    {run_begins}"}
    file = changed_copy("imagenet", dropped, tmp_path)
    run = trained_copy(file, tmp_path, **options_of("imagenet", data))
    with pytest.raises(CommandError, match=mentioning("120 60 open_data(config) --unchecked")):
        command("evaluate", "imagenet", run, file, tmp_path / "e")
    command("evaluate", "imagenet", run, file, tmp_path / "e", data=f"{data}/val")
    command("predict", "imagenet", run, file, tmp_path / "predict")
    with (tmp_path / "predict.csv").open(newline="") as rows:
        assert len([*csv.DictReader(rows)]) == 2


@pytest.mark.slow
def test_files_and_weights_that_have_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = changed_copy("imagenet", {}, tmp_path)
    few_digits(tmp_path / "data")
    run = trained_copy(file, tmp_path, **options_of("imagenet", str(tmp_path / "data")))
    sample = Path(Reference.of_content(run.read(BEST_REFERENCE)).facts["paths"][1])
    samples_of(run, file, tmp_path)
    content = sample.read_bytes()
    sample.unlink()
    sample.write_bytes(content + b"\0")
    with pytest.raises(CommandError, match=mentioning(f"{sample} changed")):
        command("evaluate", "imagenet", run, file, tmp_path / "e")
    sample.write_bytes(content)
    command("evaluate", "imagenet", run, file, tmp_path / "e", checkpoint="best")
    weights = safetensors.torch.load(run.read("best/model.safetensors"))
    last = [*weights][-1]
    weights[last] = weights[last].flip(0)
    run.write("best/model.safetensors", safetensors.torch.save(weights))
    with pytest.raises(CommandError, match=mentioning("best/model.safetensors weights")):
        command("evaluate", "imagenet", run, file, tmp_path / "e", checkpoint="best")
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    command("predict", "imagenet", run, file, tmp_path / "p")
    assert mentions(capsys.readouterr().out, "4 validation samples files read")


def test_a_checkpoint_within_an_epoch_keeps_none(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = changed_copy("imagenet", {}, tmp_path)
    options = options_of("imagenet", data) | {"epochs": 2, "checkpoint_every": 6}
    with pytest.raises(Stopped):
        trained_copy(file, tmp_path, stop_at=13, **options)
    run = RunFolder(str(tmp_path), "run")
    command("evaluate", "imagenet", run, file, tmp_path / "e")
    assert "not checked: checkpoint_000000012" in capsys.readouterr().out
    assert "beside_run" not in run.read_json("evaluation.json")


@pytest.mark.parametrize("name", ["resnet18", pytest.param("convnext_tiny", marks=pytest.mark.slow)])
def test_the_smallest_changes_that_are_seen(name: str) -> None:
    """A mean off by 0.02, and two classes swapped, are far above the limit; rounding is far below it."""
    torch.manual_seed(0)
    model: nn.Module = build_model(name, 10, 64)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3, 64, 64), np.uint8))
    with torch.no_grad():
        for _ in range(20):
            Normalized(model.train())(images)
    (outputs,) = raw_outputs(Normalized(model), images)
    (shifted,) = raw_outputs(Normalized(model, (0.505, 0.456, 0.406)), images)
    scale = outputs.abs().max()
    assert (shifted - outputs).abs().max() > 20 * OUTPUT_LIMIT * scale
    assert (outputs[:, [1, 0, *range(2, 10)]] - outputs).abs().max() > 20 * OUTPUT_LIMIT * scale
    (again,) = raw_outputs(Normalized(model.to(memory_format=torch.channels_last)), images)
    (halves,) = zip(*(raw_outputs(Normalized(model), half) for half in images.split(2)), strict=True)
    for other in (again, torch.cat(halves)):
        assert (other - outputs).abs().max() < OUTPUT_LIMIT * scale / 20


def test_a_run_of_a_gpu_is_accepted_on_a_cpu(tmp_path: Path) -> None:
    """`jobs/imagenet.py --gpu --precision bf16 --compile --epochs 6` on an H200, with torch 2.11, and fused."""
    run = RunFolder(str(shutil.copytree(RECORDED, tmp_path / "runs")), "digits")
    assert Reference.of_content(run.read(BEST_REFERENCE)).facts["device"] == "cuda"
    with dealt_to(1):
        evaluate.main(Evaluate(run=str(run)))
    found, measured = run.read_json("evaluation.json"), run.rows("epochs.jsonl")[-1]["validation"]
    assert found["checked"] == "checked on 4 validation samples: files, inputs and outputs are as in the run"
    assert "in bf16" in found["beside_run"]
    for name, tolerance in (("top1", 0), ("top5", 0), ("loss", 1e-3)):
        assert found["metrics"][name] == pytest.approx(measured[name], rel=tolerance)
    moved = {"config.mean, config.std, mirrored": "(0.505, 0.456, 0.406), config.std, mirrored"}
    with pytest.raises(CommandError, match=mentioning("network --unchecked")):
        evaluate.main(Evaluate(run=str(run), job=str(changed_copy("imagenet", moved, tmp_path))))


def test_outputs_without_a_row_for_each_sample_are_not_kept(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As boxes that a selection has found; this ends no run."""

    class Found(nn.Module):
        def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
            return [images[:1], images[1:]]

    refused = partial(raw_outputs, Found())
    with pytest.raises(ValueError, match="raw_outputs"):
        refused(torch.zeros(4, 3, 8, 8))
    monkeypatch.setattr("raydali.training.evaluation.reference.raw_outputs", lambda _, images: refused(images))
    run = trained_copy(changed_copy("imagenet", {}, tmp_path), tmp_path, **options_of("imagenet", data))
    assert run.exists("best/model.safetensors") and not run.exists(BEST_REFERENCE) and "raw_outputs" in caplog.text
