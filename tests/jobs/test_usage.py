"""Bad usage of a job: exit code 2 within seconds, an error that names the value and the remedy, nothing left behind."""

import os
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Event

import pytest
import safetensors.torch
import torch

from jobs import imagenet
from raydali.errors import UsageError
from raydali.launch.driver.command import parse
from raydali.launch.driver.own_ray import WORKERS_PER_CORE
from tests.support.messages import mentioning
from tests.support.parquets import write_parquet

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))

REMEDY = r"must |write |only |at least|lie in|try |lower |raise |give |use |needs? |ask for|such as|check |--help"

# Arguments after --name, and what the error must name; {data} is a folder of data sets, {cores} the machine's cores.
CASES = {
    # The data
    "data-missing": ("--data {data}/nowhere", "{data}/nowhere"),
    "data-a-file": ("--data {data}/file", "--data {data}/file .*--val-data"),
    "data-an-empty-list": ("--data {data}/file --val-data {data}/file", "{data}/file .*path,label"),
    "val-data-alone": ("--val-data {data}/file", "--val-data {data}/file .*--data"),
    "root-without-lists": ("--data {data}/differing --root {data}", "--root {data} .*{data}/differing"),
    "data-without-train": ("--data {data}/no-train", "{data}/no-train .*train/"),
    "data-without-val": ("--data {data}/no-val", "{data}/no-val .*val/.*--data"),
    "data-without-classes": ("--data {data}/no-classes", "{data}/no-classes/train .*class folders"),
    "data-without-images": ("--data {data}/no-images", "{data}/no-images/train .*2 class folders"),
    "data-of-other-classes": ("--data {data}/differing", "{data}/differing/val .*'dog'.*'cow'"),
    "data-of-an-unknown-kind": ("--data ftp://host/data", "ftp://host/data"),
    "data-of-one-sample-a-class": ("--data {data}/no-val/train", "{data}/no-val/train .*'cat'.*--val-data"),
    "val-fraction-of-nothing": ("--data {data} --val-fraction 0", r"val.fraction.*above 0.*0\.0"),
    "val-fraction-of-all": ("--data {data} --val-fraction 1", r"val.fraction.*below 1.*1\.0"),
    "val-fraction-alone": ("--val-fraction 0.1", r"val.fraction 0\.1 .*--data"),
    "several-labels-of-folders": ("--data {data}/differing --multi-label", "--multi-label .*{data}/differing/train"),
    "several-labels-alone": ("--multi-label", "--multi-label.*--data"),
    "several-columns": (
        "--data {data}/columns.csv --val-fraction 0.5",
        "columns.csv .*'cat', 'dog'.*--label-column dog",
    ),
    "labels-but-0-or-1": (
        "--data {data}/columns.csv --val-fraction 0.5 --multi-label",
        "columns.csv.*line 2.*'2' in column 'dog'.*write",
    ),
    "label-column-of-folders": ("--data {data}/differing --label-column x", "--label-column x .*{data}/differing"),
    "shards-alone": ("--data {data}/0.tar", "0.tar .*--val-data"),
    "shards-missing": ("--data {data}/{{0..1}}.tar --val-data {data}/0.tar", "2 of 2 files"),
    "tfrecord": ("--data {data}/train-*-of-00010", "-of-00010 .*--val-data"),
    "parquet-alone": ("--data {data}/a.parquet", "a.parquet .*--val-data"),
    "parquet-without-images": (
        "--data {data}/a.parquet --val-fraction 0.5",
        "a.parquet .*'image'.*'img', 'label'.*--image-column",
    ),
    "parquet-without-labels": (
        "--data {data}/a.parquet --val-fraction 0.5 --image-column img --label-column kind",
        "a.parquet .*'kind'.*'img', 'label'.*--label-column",
    ),
    "parquet-of-text": ("--data {data}/text.parquet --val-fraction 0.5", "{data}/text.parquet .*no Parquet.*write"),
    "several-labels-of-parquet": (
        "--data {data}/a.parquet --val-fraction 0.5 --multi-label",
        "--multi-label .*a.parquet",
    ),
    "image-column-of-folders": ("--data {data}/differing --image-column x", "--image-column x .*{data}/differing"),
    "image-column-alone": ("--image-column x", "--image-column x .*--data"),
    "more-workers-than-micro-batches": (
        "--global-batch-size 32 --batch-size 32 --workers 2",
        r"2 workers .*1 micro-batch \(32 / 32\).*--workers",
    ),
    # What no option takes
    "unknown-option": ("--batchsize 32", "no option --batchsize.*--batch-size.*--help"),
    "stray-word": ("32", "no argument 32.*--help"),
    "fraction-for-a-whole-number": ("--batch-size 1.5", "--batch-size.*'1.5'"),
    "one-number-for-two": ("--random-area 0.5", "--random-area"),
    "precision": ("--precision fp8", "--precision (?=.*bf16)(?=.*fp16)(?=.*fp32).*'fp8'"),
    "loader": ("--loader tf", "--loader (?=.*dali)(?=.*torch)(?=.*synthetic).*'tf'"),
    "model": ("--model resnet51", "resnet51.*resnet50"),
    "recipe": ("--recipe fashon", "--recipe fashon.*fashion"),
    "model-of-another-size": (
        "--model vit_b_16 --image-size 40 --resize-size 40",
        "vit_b_16 .*40x40 .*--image-size 32",
    ),
    "model-of-no-module": ("--model nowhere.nets:build", "nowhere.*every node"),
    # Weights and layers
    "weights-missing": ("--weights {data}/nowhere.pth", "{data}/nowhere.pth .*default"),
    "weights-of-text": ("--weights {data}/text.pth", "{data}/text.pth .*give"),
    "weights-that-run-code": ("--weights {data}/code.pth", "{data}/code.pth .*(code|tensors)"),
    "weights-cut-short": ("--weights {data}/short.safetensors", "{data}/short.safetensors"),
    "weights-of-another-model": ("--weights {data}/other.pth", "{data}/other.pth .*0%.*90%.*--model"),
    "weights-of-a-folder": ("--weights {data}", "{data} .*run"),
    "weights-of-nobody": ("--weights default", "default.*digits"),
    "freeze-nothing": ("--freeze features", "--freeze 'features'.*0.weight"),
    "freeze-all": ("--freeze .", r"--freeze '\.'.*all"),
    "freeze-by-no-expression": ("--freeze (", r"--freeze '\('"),
    "layer-decay": ("--layer-decay 0", r"layer.decay.*above 0.*0\.0"),
    "layer-decay-above-1": ("--layer-decay 1.5", r"layer.decay.*at most 1.*1\.5"),
    "head-rate": ("--head-lr-scale 0", r"head.lr.scale.*above 0.*0\.0"),
    "deviation-of-nothing": ("--std 0 1 1", r"--std.*above 0.*\(0\.0, 1\.0, 1\.0\)"),
    "mean-in-bytes": ("--mean 123 117 104", r"--mean .*at most 1.*123.*--mean 0\.482 0\.459 0\.408"),
    "deviation-in-bytes": ("--std 58 57 57", r"--std .*at most 1.*58.*--std 0\.227"),
    # Workers
    "no-workers": ("--workers 0", "--workers.*at least 1.*0"),
    "workers-of-a-word": ("--workers x", "--workers.*MIN:MAX.*x"),
    "workers-reversed": ("--workers 3:2", "--workers.*3:2"),
    "workers-beyond-the-machine": ("--workers {too_many}", "{too_many} workers.* {cores} cores.*--workers"),
    "no-cpus": ("--cpus-per-worker 0", "cpus.per.worker.*at least 1.*0"),
    "failures": ("--max-failures -2", "max.failures.*-2"),
    "sync-bn-on-cpus": ("--sync-bn --no-gpu", "--sync-bn.*GPU"),
    # Sizes
    # With one epoch, which no default of the warm-up may refuse.
    "global-batch-no-multiple": ("--global-batch-size 40 --epochs 1", "global.batch.size.*batch.size 32.*40.*64"),
    "global-batch-of-nothing": ("--global-batch-size 0", "global.batch.size.*0"),
    "batch-of-nothing": ("--batch-size 0", "batch.size.*0"),
    "fewer-samples-than-a-batch": ("--global-batch-size 2048 --batch-size 2048", "1,437 samples.* 2048.*--batch-size"),
    "no-epochs": ("--epochs 0", "epochs.*at least 1.*0"),
    "image-of-nothing": ("--image-size 0", "image.size.*at least 1.*0"),
    "resize-below-image": ("--image-size 32 --resize-size 31", "resize.size.*31.*image.size.*32"),
    # What tyro rejects
    "no-integer": ("--epochs ten", "--epochs .*whole number.*'ten'"),
    "no-number": ("--learning-rate 0,1", "--learning-rate .*number.*'0,1'"),
    "no-value": ("--epochs", "--epochs needs"),
    # Numbers out of their range
    "hardware-decoder": ("--hw-decoder-load 2", r"hw.decoder.load.*0.*1.*2\.0"),
    "seed": ("--seed -1", "seed.*-1"),
    "random-area": ("--random-area 0 2", r"random.area.*\(0\.0, 2\.0\)"),
    "flip-probability": ("--flip-probability 2", "flip.probability.*2"),
    "learning-rate": ("--learning-rate -1", "learning.rate.*-1"),
    "learning-rate-nan": ("--learning-rate nan", "learning.rate.*nan"),
    "warmup": ("--epochs 3 --warmup-epochs 4", "warmup.epochs.*3.*4"),
    "warmup-negative": ("--warmup-epochs -1", "warmup.epochs.*-1"),
    "momentum": ("--momentum 1.5", r"momentum.*1\.5"),
    "optimizer": ("--optimizer lam", "--optimizer.*lamb"),
    "no-decay": ("--no-decay norm", "--no-decay.*norms"),
    "schedule": ("--schedule stp:30,0.1", "--schedule.*stp:30,0.1.*step:30,0.1"),
    "warmup-start": ("--warmup-start 2", r"warmup.start.*at most 1.*2\.0"),
    "least-rate-above-the-peak": ("--min-learning-rate 0.2", r"min.learning.rate.*at most 0\.1.*0\.2"),
    "clip-grad": ("--clip-grad 0", r"clip.grad.*above 0.*0\.0"),
    "weight-decay": ("--weight-decay -0.1", r"weight.decay.*-0\.1"),
    "label-smoothing": ("--label-smoothing 2", "label.smoothing.*2"),
    "loss": ("--loss bc", "--loss.*bce"),
    "threshold-without-bce": ("--bce-threshold 0.2", r"--bce-threshold 0\.2 .*--loss bce"),
    "weights-of-classes-with-bce": ("--loss bce --class-weights balanced", "--class-weights balanced .*--loss bce"),
    "drop-path": ("--drop-path 1", r"drop.path.*below 1.*1\.0"),
    "drop-path-of-no-branch": ("--drop-path 0.1", "--model digits .*--drop-path.*resnet50"),
    "ema-warmup-without-ema": ("--ema-warmup", "--ema-warmup .*--ema-decay"),
    "mixup": ("--mixup -1", "mixup.*-1"),
    "cutmix": ("--cutmix -1", "cutmix.*-1"),
    "ema-decay": ("--ema-decay 1", "ema.decay.*1"),
    "checkpoint-every": ("--checkpoint-every -1", "checkpoint.every.*-1"),
    "hang-timeout": ("--hang-timeout 5", "--hang-timeout.*0 or .*10.*5"),
    "start-timeout": ("--start-timeout 5", "--start-timeout.*0 or .*10.*5"),
    "bad-fraction": ("--max-bad-fraction 2", r"max.bad.fraction.*1.*2\.0"),
    "profile-steps": ("--profile-steps 5:2", "--profile-steps.*A:B.*5:2"),
    "exclude": ("--exclude {data}/nowhere", "--exclude {data}/nowhere"),
    "gpu-and-no-gpu": ("--gpu --no-gpu", "--gpu .*--no-gpu"),
    "shuffle-block": ("--shuffle-block -1", "shuffle.block.*0.*-1"),
    "repeats": ("--repeats 0", "repeats.*at least 1.*0"),
    "repeats-of-less-than-two-batches": (
        "--repeats 12 --workers 1 --global-batch-size 64",
        "--repeats 12 .* 64 .*1,437 samples.* 11",
    ),
    "repeats-of-blocks-apart": ("--repeats 2 --shuffle-block 32 --shuffle-apart", "--repeats 2 .*--no-shuffle-apart"),
    "track-tensorboard": ("--track tensorboard", "--track tensorboard .*tensorboard/"),
    "track": ("--track tensorbard", "--track.*mlflow,wandb.*tensorbard"),
    # Storage
    "name": ("--name a/b", "--name 'a/b'"),
    "storage-below-a-file": ("--storage {data}/file", "--storage {data}/file"),
    "storage-in-proc": ("--storage /proc/raydali", "--storage /proc/raydali"),
    "storage-of-an-unknown-kind": ("--storage ftp://host/runs", "--storage ftp://host/runs"),
    "storage-that-does-not-answer": ("--storage s3://bucket/runs", "s3://bucket/runs.*[Cc]onnect"),
}


class RunsCode:
    """Its pickle creates the file `executed` in the current folder when it is loaded."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that are no data set, each for another reason; nobody looks into the images."""
    root = tmp_path_factory.mktemp("data")
    for file in (
        "file",
        "no-train/val/cat/1.jpg",
        "no-val/train/cat/1.jpg",
        "no-classes/train/1.jpg",
        "no-classes/val/1.jpg",
        "no-images/train/cat/1.txt",
        "no-images/train/dog/1.txt",
        "no-images/val/cat/1.jpg",
        "no-images/val/dog/1.jpg",
        "differing/train/cat/1.jpg",
        "differing/train/dog/1.jpg",
        "differing/val/cat/1.jpg",
        "differing/val/cow/1.jpg",
    ):
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (root / "columns.csv").write_text("path,cat,dog\n1.jpg,1,2\n")
    write_parquet(root / "a.parquet", [b"", b""], [0, 1], columns=("img", "label"))
    (root / "text.parquet").write_text("parquet\n")
    (root / "text.pth").write_text("weights\n")
    torch.save({"0.weight": RunsCode()}, root / "code.pth")
    torch.save({"layer.weight": torch.ones(3)}, root / "other.pth")
    safetensors.torch.save_file({"0.weight": torch.ones(900)}, root / "short.safetensors")
    os.truncate(root / "short.safetensors", 1000)
    return root


AWS = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "none",
}


def run_jobs(commands: dict[Path, list[str]], modules: Path) -> None:
    """Run the job's script with these arguments as a user does, in each folder, which keeps stdout, stderr and code."""
    for name in [name for name in os.environ if name.startswith(("RAY_", "AWS_"))]:
        del os.environ[name]
    os.environ.update(AWS)
    sys.path.insert(0, str(modules))
    for folder, arguments in commands.items():
        os.chdir(folder)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv = [str(ROOT / "jobs/imagenet.py"), "--storage", str(folder / "runs"), "--name", "run", *arguments]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            (folder / "code").write_text(str(end.code))
        written = Event()
        sys.stderr.buffer.call(written.set)  # type: ignore[union-attr]  # by a thread
        written.wait()


def refusal(folder: Path) -> str:
    """The error, one line that comes last."""
    errors = (folder / "stderr").read_text()
    output = (folder / "stdout").read_text() + errors
    assert "Traceback" not in output, output
    assert (folder / "code").read_text() == "2", output
    last = errors.splitlines()[-1]
    assert last.startswith("error: "), output
    assert not (folder / "runs").exists(), sorted((folder / "runs").rglob("*"))
    assert not (folder / "executed").exists(), "a pickle was executed"
    return last


@pytest.fixture(scope="module")
def refused(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case, after all jobs have run where Ray cannot be imported: its start would take seconds."""
    root = tmp_path_factory.mktemp("cases")
    (root / "ray.py").write_text("raise SystemExit('Ray was started before the refusal')\n")
    figures = {"data": data, "cores": CORES, "too_many": WORKERS_PER_CORE * CORES + 1}
    commands = {root / case: arguments.format(**figures).split() for case, (arguments, _) in CASES.items()}
    for folder in commands:
        folder.mkdir()
    process = get_context("spawn").Process(target=run_jobs, args=(commands, root))
    process.start()
    process.join(280)
    process.kill()
    return root


@pytest.mark.parametrize("case", CASES)
def test_bad_usage_is_refused_before_ray_starts(case: str, data: Path, refused: Path) -> None:
    said = refusal(refused / case)
    named = CASES[case][1].format(data=data, cores=CORES, too_many=WORKERS_PER_CORE * CORES + 1)
    assert re.search(named, said), said
    assert re.search(REMEDY, said), said


def test_the_first_options_come_first(capfd: pytest.CaptureFixture[str]) -> None:
    """In groups, with those that a copied job declares itself; --help-all shows all."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(imagenet.Config):
        """Train mine."""

        mine: int = 3
        """An option
        of mine."""

    shown = []
    for argument in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            parse(Mine, [argument], "raydali train mine.py")
        assert end.value.code == 0
        shown.append(capfd.readouterr().out)
    first, every = (re.findall(r"(?m)^│ (--[a-z-]+)", each) for each in shown)
    assert 18 <= len(first) <= 26 and len(every) > 75 and {*first} < {*every}
    assert {"--data", "--model", "--epochs", "--workers", "--name", "--mine"} <= {*first}
    assert "(default: 3)" in shown[0] and "raydali train mine.py --help-all" in shown[0]


def test_a_default_of_the_class_is_not_given() -> None:
    """A copied job may have another share of validation, and the demo's options beside it, which have no --data."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(imagenet.Config):
        val_fraction: float | None = 0.4

    assert Mine(model="digits").data is None
    with pytest.raises(UsageError, match=mentioning("--val-fraction 0.3 --data")):
        Mine(val_fraction=0.3)
