"""`raydali evaluate` of classifiers: each sample once on any number of workers, and the figures of torchmetrics."""

import csv
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
    multiclass_confusion_matrix,
    multiclass_f1_score,
    multiclass_precision,
    multiclass_recall,
)

from jobs import imagenet
from raydali import cli
from raydali.commands import evaluate
from raydali.commands.evaluate import Evaluate
from raydali.data.builtin.digits import digits_folder
from raydali.data.index.labeled import LabeledFiles
from raydali.errors import CommandError, DataError, UsageError
from raydali.inference.samples import labeled_samples
from raydali.inference.trained_run import open_run
from raydali.run.data_contents import compared_contents, write_contents
from raydali.run.folder import RunFolder
from raydali.text import plural
from tests.support.digits import SHORT, few_digits
from tests.support.job_ranks import train_rank
from tests.support.messages import mentioning, mentions
from tests.support.ranks import run_ranks
from tests.support.tars import packed
from tests.support.trained_runs import dealt_to, made_run, started_run

CLASSES = [*map(str, range(10))]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every third of the digits: 120 of them validate."""
    root = tmp_path_factory.mktemp("digits")
    few_digits(root)
    return root


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A short run with a moving average of its weights."""
    config = replace(SHORT, data=str(data), ema_decay=0.5, global_batch_size=16, epochs=3, warmup_epochs=0.5)
    folder = started_run(tmp_path_factory.mktemp("runs"), imagenet, config, CLASSES)
    run_ranks(1, train_rank, imagenet.train, config, few_digits_of(data), folder)
    return folder


def few_digits_of(data: Path) -> imagenet.Data:
    return imagenet.Data(*(LabeledFiles.scan(f"{data}/{split}") for split in ("train", "val")))


def evaluated(run: RunFolder, workers: int = 1, **given: Any) -> dict[str, Any]:
    """What evaluation.json has, without the times; the command fails if samples are broken."""
    failed = ""
    with dealt_to(workers):
        try:
            evaluate.main(Evaluate(run=str(run), **given))
        except CommandError as error:
            failed = str(error)
    found: dict[str, Any] = run.read_json("evaluation.json")
    assert mentions(failed, plural(len(found["broken"]), "image")) if found["broken"] else not failed
    assert found.pop("time") > 1e9 and found.pop("samples_per_second") > 0
    return found


@pytest.fixture
def copied(data: Path, tmp_path: Path) -> Path:
    """A copy of the validation images, for changes."""
    shutil.copytree(data / "val", tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("batch_size", [7, *(pytest.param(each, marks=pytest.mark.slow) for each in (16, 1000))])
def test_it_is_the_same_on_any_number_of_workers(run: RunFolder, copied: Path, batch_size: int) -> None:
    broken = sorted(copied.glob("*/*"))
    for file in broken[8:24:3]:
        file.unlink()
        file.write_bytes(b"no image")
    first, *others = (evaluated(run, n, data=str(copied), batch_size=batch_size) for n in (1, 2, 3))
    assert all(other == first for other in others)
    assert [each["path"] for each in first["broken"]] == [*map(str, broken[8:24:3])]
    assert first["samples"] == sum(row["images"] for row in first["classes"]) == 120 - 6
    assert run.read("worst.png").startswith(b"\x89PNG")


def test_figures_are_those_of_torchmetrics(run: RunFolder, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(run)
    assert found["weights"] == f"best/model.safetensors of epoch {run.read_json('model.json')['best']['epoch']}"
    said = capsys.readouterr().out
    assert f"{found['metrics']['top1']:.4g}" in said and f"{run}/report.html" in said
    opened, source = open_run(str(run)), LabeledFiles.scan(f"{data}/val")
    network, truth = opened.network(10), torch.from_numpy(source.labels)
    pixels = torch.stack([opened.pipeline.sample(source, id, 0)[0] for id in range(len(source))])
    with torch.inference_mode():
        logits = network(pixels)
    for name, k in (("top1", 1), ("top5", 5)):
        ours = multiclass_accuracy(logits, truth, 10, top_k=k, average="micro")
        assert found["metrics"][name] == pytest.approx(ours.item(), abs=1e-6)
    losses = torch.nn.functional.cross_entropy(logits, truth, reduction="none")
    assert found["metrics"]["loss"] == pytest.approx(losses.mean().item(), abs=1e-3)
    calibration = multiclass_calibration_error(logits.softmax(1), truth, 10, n_bins=15)
    assert found["metrics"]["calibration_error"] == pytest.approx(calibration.item(), abs=5e-3)
    assert found["metrics"]["confidence"] == pytest.approx(logits.softmax(1).max(1).values.mean().item(), abs=1e-3)
    assert found["confusion"] == multiclass_confusion_matrix(logits, truth, 10).tolist()
    for name, metric in (
        ("recall", multiclass_recall),
        ("precision", multiclass_precision),
        ("f1", multiclass_f1_score),
    ):
        of_classes = metric(logits, truth, 10, average=None).tolist()
        assert [row[name] or 0.0 for row in found["classes"]] == pytest.approx(of_classes, abs=1e-6)
    worst = losses.sort(descending=True)
    assert len(found["worst"]) == 64
    assert [each["loss"] for each in found["worst"]] == pytest.approx(worst.values[:64].tolist(), abs=5e-2)
    assert found["worst"][0]["path"] == source.path(int(worst.indices[0]))


def test_the_worst_are_drawn(run: RunFolder) -> None:
    found = evaluated(run)
    sheet = np.asarray(Image.open(io.BytesIO(run.read("worst.png"))).convert("RGB"))
    with Image.open(found["worst"][0]["path"]) as image:
        small = image.convert("RGB").resize((32, 32))
    pixels = np.asarray(small.resize((120, 120), Image.Resampling.NEAREST)).astype(int)
    differences = [np.abs(sheet[top : top + 120, 160:280] - pixels).mean() for top in range(100, 240)]
    assert min(differences) < 25 < np.median(differences)
    assert run.read("report.html").count(b'alt="worst.png') == 1


@pytest.mark.slow
def test_the_newest_weights(run: RunFolder, data: Path, tmp_path: Path) -> None:
    """Those of the moving average, and without one those of the model."""
    averaged = evaluated(run, checkpoint="newest")
    assert averaged["weights"].startswith("checkpoint_")
    last = json.loads(run.read("epochs.jsonl").splitlines()[-1])["validation"]
    assert averaged["metrics"]["loss"] == pytest.approx(last["loss"], abs=1e-6)

    config = replace(SHORT, data=str(data), epochs=1)
    plain = started_run(tmp_path, imagenet, config, CLASSES)
    run_ranks(1, train_rank, imagenet.train, config, few_digits_of(data), plain)
    newest, best = (evaluated(plain, checkpoint=each) for each in ("newest", "best"))
    assert newest.pop("weights") != best.pop("weights") and newest == best
    assert newest["metrics"]["loss"] != pytest.approx(last["loss"], abs=1e-3)


def test_classes_are_found_by_name(run: RunFolder, copied: Path) -> None:
    every = evaluated(run, data=str(copied))
    for name in ("0", "1", "5"):
        shutil.rmtree(copied / name)
    some = evaluated(run, data=str(copied))
    assert [row["class"] for row in some["classes"]] == CLASSES
    for before, after in zip(every["classes"], some["classes"], strict=True):
        same = after["class"] not in ("0", "1", "5")
        assert after["recall"] == (before["recall"] if same else None)
        assert after["images"] == (before["images"] if same else 0)


@pytest.mark.slow
def test_data_of_every_kind(run: RunFolder, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with val/, lists with any columns, and shards have the same images."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = evaluated(run)["metrics"]
    assert evaluated(run, data=str(data))["metrics"] == expected
    files = sorted((data / "val").glob("*/*"))
    with (tmp_path / "list.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["path", "hand", "digit"])
        lines.writerows([file.relative_to(data), "left", file.parent.name] for file in files)
    found = evaluated(run, data=str(tmp_path / "list.csv"), root=str(data), label_column="digit")
    assert found["metrics"] == expected
    members = {f"{id:04}.{ending}": content for id, file in enumerate(files) for ending, content in
               (("cls", file.parent.name.encode()), ("jpg", file.read_bytes()))}  # fmt: skip
    (tmp_path / "a.tar").write_bytes(packed(members))
    assert evaluated(run, data=str(tmp_path / "a.tar"))["metrics"] == expected
    with pytest.raises(UsageError, match=mentioning("--label-column digit")):
        evaluated(run, label_column="digit")


def test_nothing_can_be_read(run: RunFolder, copied: Path) -> None:
    before = run.read("evaluation.json") if run.exists("evaluation.json") else None
    for file in copied.glob("*/*"):
        file.unlink()
        file.write_bytes(b"")
    with pytest.raises(DataError):
        evaluated(run, data=str(copied))
    assert (run.read("evaluation.json") if before else None) == before


@pytest.mark.slow
def test_a_run_without_model_json(run: RunFolder, data: Path, tmp_path: Path) -> None:
    expected = evaluated(run)
    shutil.copytree(run.path(), tmp_path / "old")
    old = RunFolder(str(tmp_path), "old")
    old.remove("model.json")
    with pytest.raises(UsageError, match=mentioning("--job")):
        evaluated(old)
    for other in (None, str(data / "val")):
        assert evaluated(old, job="imagenet", data=other)["metrics"] == expected["metrics"]


def test_a_run_that_cannot_be_written(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(RunFolder, "write", refuse)
    with dealt_to(1):
        evaluate.main(Evaluate(run=str(run), json=str(tmp_path / "e.json")))
    assert json.loads((tmp_path / "e.json").read_text())["samples"] == 120
    assert "evaluation.json" in caplog.text and "Permission denied" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("ray")
def test_real_workers(run: RunFolder, tmp_path: Path) -> None:
    expected = evaluated(run)
    for workers in (1, 2, 3):
        cli.main(["evaluate", str(run), "--workers", str(workers), "--cpus-per-worker", "1", "--json", f"{tmp_path}/e"])
        found = json.loads((tmp_path / "e").read_text())
        del found["time"], found["samples_per_second"]
        assert found == expected


def test_data_that_have_changed_under_their_names_are_warned_of(
    run: RunFolder, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the run's own data, also if they are given, in whatever folder; not of others."""
    shutil.copytree(data, tmp_path / "data")
    shutil.copytree(str(run), tmp_path / "run")
    opened = open_run(str(tmp_path / "run"))
    write_contents(opened.folder, compared_contents(opened.folder, [LabeledFiles.scan(str(data / "val"))])[1])
    val = tmp_path / "data" / "val"
    labeled_samples(opened, str(tmp_path / "data"))
    assert not caplog.messages
    first, other = min((val / "0").iterdir()), min((val / "1").iterdir())
    first.write_bytes(other.read_bytes())
    labeled_samples(opened, str(tmp_path / "data"))
    (warning,) = caplog.messages
    assert mentions(warning, f"{opened.folder} 1 120 files {first}")
    (val / "2" / "new.jpg").write_bytes(other.read_bytes())  # samples of another name are other data
    labeled_samples(opened, str(tmp_path / "data"))
    assert len(caplog.messages) == 1


# What it refuses, before anything is loaded: one line that names the value


@pytest.fixture
def untrained(tmp_path: Path) -> RunFolder:
    return made_run(tmp_path, imagenet, imagenet.DIGITS, CLASSES)


def refused(run: RunFolder | Path | str, named: str, **given: Any) -> None:
    with dealt_to(1), pytest.raises(UsageError, match=mentioning(named)) as error:
        evaluate.main(Evaluate(run=str(run), **given))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", b"{", "config.json"),
        ("config.json", b"[1]", "config.json"),
        ("config.json", b"\xff", "config.json"),
        ("config.json", b'{"epochs": "many"}', "config.json"),
        ("model.json", b"{", "model.json"),
        ("model.json", b"[1]", "model.json"),
        ("model.json", b'{"job": "imagenet"}', "model.json"),
        ("model.json", b'{"job": {"name": "imagenet"}, "classes": 3}', "model.json"),
        ("model.json", b'{"job": {"name": "gone"}, "classes": ["a"]}', "gone"),
        ("model.json", b'{"job": {"name": "imagenet"}, "classes": ["a", "b"]}', "classes"),
        ("best/model.safetensors", b"", "best/model.safetensors"),
        ("best/model.safetensors", b"x" * 100, "best/model.safetensors"),
        ("best/model.safetensors", b"\x02\0\0\0\0\0\0\0{}", "best/model.safetensors"),
    ],
)
def test_broken_files_of_the_run(untrained: RunFolder, file: str, content: bytes, named: str) -> None:
    untrained.write(file, content)
    refused(untrained, named)


def test_what_is_no_run_or_has_no_weights_yet(untrained: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty config.json")
    refused(tmp_path / "nowhere", "nowhere")
    started = started_run(tmp_path, imagenet, imagenet.DIGITS, CLASSES, name="started")
    refused(started, "started best/model.safetensors")
    refused(started, "started checkpoint", checkpoint="newest")
    refused(untrained, "--gpu", gpu=True, no_gpu=True)
    refused(untrained, "--batch-size 0", batch_size=0)
    refused(untrained, "nowhere/e.json", json=str(tmp_path / "nowhere/e.json"))


def job_in(folder: Path, change: Callable[[str], str]) -> Path:
    assert imagenet.__file__ is not None
    file = folder / "my_job.py"
    file.write_text(change(Path(imagenet.__file__).read_text()))
    return file


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("def val_pipeline", "def other_pipeline", "my_job.py val_pipeline"),
        ("def build_model", "def built", "my_job.py build_model"),
        ("from dataclasses", "import nothing_of_that_name\nfrom dataclasses", "my_job.py nothing_of_that_name"),
        ("return raydali.ValidationImages(", "return dict(", "dict"),
    ],
)
def test_other_jobs(untrained: RunFolder, tmp_path: Path, old: str, new: str, named: str) -> None:
    refused(untrained, named, job=str(job_in(tmp_path, lambda text: text.replace(old, new))))


def test_the_job_of_the_user(
    untrained: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It must lie where the run found it; a warning says that it has changed."""
    monkeypatch.chdir(tmp_path)
    facts = untrained.read_json("model.json")
    untrained.write_json("model.json", facts | {"job": {"file": "my_job.py", "sha256": "0" * 64}})
    refused(untrained, "my_job.py --job")
    job_in(tmp_path, str)
    with dealt_to(1):
        evaluate.main(Evaluate(run=str(untrained)))
    assert "my_job.py" in caplog.text and "changed" in caplog.text


@pytest.mark.parametrize(("splits", "wanted"), [(("train",), "train"), (("test", "train", "valid"), "valid")])
def test_a_set_without_val(untrained: RunFolder, tmp_path: Path, splits: tuple[str, ...], wanted: str) -> None:
    for name in splits:
        shutil.copytree(Path(digits_folder(), "val/3"), tmp_path / "data" / name / "3")
    refused(untrained, f"{wanted}/ val/ {tmp_path}/data/{wanted}", data=str(tmp_path / "data"))


def test_a_class_without_samples_need_not_be_one_of_the_run(untrained: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(Path(digits_folder(), "val/3"), tmp_path / "data/3")
    (tmp_path / "data/a lynx").mkdir()
    source, classes = labeled_samples(open_run(str(untrained)), str(tmp_path / "data"))
    assert isinstance(source, LabeledFiles) and source.classes == classes
    assert {*source.labels.tolist()} == {classes.index("3")}


def test_other_data(untrained: RunFolder, tmp_path: Path) -> None:
    for name in ("0", "1", "lynx"):
        shutil.copytree(Path(digits_folder(), "val/3"), tmp_path / "data" / name)
    refused(untrained, "lynx", data=str(tmp_path / "data"))
    refused(untrained, "nowhere", data=str(tmp_path / "nowhere"))
    (tmp_path / "list.csv").write_text("data/0/0003.jpg,unknown\n")
    refused(untrained, "unknown", data=str(tmp_path / "list.csv"))
    refused(untrained, "--root", data=str(tmp_path / "data"), root="/data")
