"""Bad usage of a job: exit code 2 within seconds, an error that names the value and the remedy, nothing left behind.

What a module refuses is tested beside it: data in tests/data/index, weights in tests/training/weights.
"""

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
import torch

from jobs import imagenet
from raydali.errors import UsageError
from raydali.launch.driver.command import parse
from raydali.launch.driver.own_ray import WORKERS_PER_CORE
from tests.support.messages import mentioning
from tests.support.trees import grow

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))

REMEDY = r"must |write |only |at least|lie in|try |lower |raise |give |use |needs? |ask for|such as|check |--help"

# Arguments after --name, and what the error must name; {data} is a folder of data sets, {cores} the machine's cores.
CASES = {
    # The data
    "data-missing": ("--data {data}/nowhere", "{data}/nowhere"),
    "data-a-file": ("--data {data}/file", "--data {data}/file .*--val-data"),
    "val-data-alone": ("--val-data {data}/file", "--val-data {data}/file .*--data"),
    "root-without-lists": ("--data {data}/folders --root {data}", "--root {data} .*{data}/folders"),
    "val-fraction-of-nothing": ("--data {data} --val-fraction 0", r"val.fraction.*above 0.*0\.0"),
    "val-fraction-of-all": ("--data {data} --val-fraction 1", r"val.fraction.*below 1.*1\.0"),
    "val-fraction-alone": ("--val-fraction 0.1", r"val.fraction 0\.1 .*--data"),
    "fold-alone": ("--fold 1/5", "--fold 1/5 .*--data"),
    "fold-beyond": ("--data {data}/folders --fold 6/5", "--fold .*1/5.*6/5"),
    "fold-of-split-folders": ("--data {data}/folders --fold 2/5", "--fold 2/5 .*{data}/folders/train"),
    "group-that-is-none": ("--data {data}/folders --val-group x", "--val-group x .*parentheses"),
    "several-labels-of-folders": ("--data {data}/folders --multi-label", "--multi-label .*{data}/folders/train"),
    "several-labels-alone": ("--multi-label", "--multi-label.*--data"),
    "label-column-of-folders": ("--data {data}/folders --label-column x", "--label-column x .*{data}/folders"),
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
    # Weights and layers
    "weights-missing": ("--weights {data}/nowhere.pth", "{data}/nowhere.pth .*default"),
    "weights-that-run-code": ("--weights {data}/code.pth", "{data}/code.pth .*(code|tensors)"),
    "weights-of-a-folder": ("--weights {data}", "{data} .*run"),
    "freeze-all": ("--freeze .", r"--freeze '\.'.*all"),
    "layer-decay": ("--layer-decay 0", r"layer.decay.*above 0.*0\.0"),
    "layer-decay-above-1": ("--layer-decay 1.5", r"layer.decay.*at most 1.*1\.5"),
    "head-rate": ("--head-lr-scale 0", r"head.lr.scale.*above 0.*0\.0"),
    "deviation-of-nothing": ("--std 0 1 1", r"--std.*above 0.*\(0\.0, 1\.0, 1\.0\)"),
    "mean-in-bytes": ("--mean 123 117 104", r"--mean .*at most 1.*123.*--mean 0\.482 0\.459 0\.408"),
    "deviation-in-bytes": ("--std 58 57 57", r"--std .*at most 1.*58.*--std 0\.227"),
    # Workers
    "workers-beyond-the-machine": ("--workers {too_many}", "{too_many} workers.* {cores} cores.*--workers"),
    "sync-bn-on-cpus": ("--sync-bn --no-gpu", "--sync-bn.*GPU"),
    # Sizes
    # With one epoch, which no default of the warm-up may refuse.
    "global-batch-no-multiple": ("--global-batch-size 40 --epochs 1", "global.batch.size.*batch.size 32.*40.*64"),
    "fewer-samples-than-a-batch": ("--global-batch-size 2048 --batch-size 2048", "1,437 samples.* 2048.*--batch-size"),
    "image-of-nothing": ("--image-size 0", "image.size.*at least 1.*0"),
    "resize-below-image": ("--image-size 32 --resize-size 31", "resize.size.*31.*image.size.*32"),
    # What tyro rejects
    "no-integer": ("--epochs ten", "--epochs .*whole number.*'ten'"),
    "no-number": ("--learning-rate 0,1", "--learning-rate .*number.*'0,1'"),
    "no-value": ("--epochs", "--epochs needs"),
    # Numbers out of their range
    "hardware-decoder": ("--hw-decoder-load 2", r"hw.decoder.load.*0.*1.*2\.0"),
    "random-area": ("--random-area 0 2", r"random.area.*\(0\.0, 2\.0\)"),
    "flip-probability": ("--flip-probability 2", "flip.probability.*2"),
    "learning-rate": ("--learning-rate -1", "learning.rate.*-1"),
    "learning-rate-nan": ("--learning-rate nan", "learning.rate.*nan"),
    "warmup": ("--epochs 3 --warmup-epochs 4", "warmup.epochs.*3.*4"),
    "warmup-negative": ("--warmup-epochs -1", "warmup.epochs.*-1"),
    "momentum": ("--momentum 1.5", r"momentum.*1\.5"),
    "optimizer": ("--optimizer lam", "--optimizer.*lamb"),
    "no-decay": ("--no-decay norm", "--no-decay.*norms"),
    "warmup-start": ("--warmup-start 2", r"warmup.start.*at most 1.*2\.0"),
    "least-rate-above-the-peak": ("--min-learning-rate 0.2", r"min.learning.rate.*at most 0\.1.*0\.2"),
    "clip-grad": ("--clip-grad 0", r"clip.grad.*above 0.*0\.0"),
    "weight-decay": ("--weight-decay -0.1", r"weight.decay.*-0\.1"),
    "label-smoothing": ("--label-smoothing 2", "label.smoothing.*2"),
    "loss": ("--loss bc", "--loss.*bce"),
    "threshold-without-bce": ("--bce-threshold 0.2", r"--bce-threshold 0\.2 .*--loss bce"),
    "weights-of-classes-with-bce": ("--loss bce --class-weights balanced", "--class-weights balanced .*--loss bce"),
    "weights-of-classes-with-focal": (
        "--loss focal --class-weights balanced",
        "--class-weights balanced .*--loss focal",
    ),
    "smoothing-with-focal": ("--loss focal --label-smoothing 0.1", r"--loss focal .*0\.1 .*--label-smoothing 0$"),
    "asymmetric-for-one-label": ("--loss asymmetric", "--loss asymmetric .*--multi-label.*--loss focal"),
    "drop-path": ("--drop-path 1", r"drop.path.*below 1.*1\.0"),
    "ema-warmup-without-ema": ("--ema-warmup", "--ema-warmup .*--ema-decay"),
    "mixup": ("--mixup -1", "mixup.*-1"),
    "cutmix": ("--cutmix -1", "cutmix.*-1"),
    "ema-decay": ("--ema-decay 1", "ema.decay.*1"),
    "patience": ("--patience 0", "--patience.*at least 1.*0"),
    "stop-after": ("--stop-after 0", "--stop-after.*at least 1.*0"),
    "stop-after-the-end": ("--epochs 4 --stop-after 5", "--stop-after.*at most 4.*5"),
    "checkpoint-every": ("--checkpoint-every -1", "checkpoint.every.*-1"),
    "hang-timeout": ("--hang-timeout 5", "--hang-timeout.*0 or .*10.*5"),
    "start-timeout": ("--start-timeout 5", "--start-timeout.*0 or .*10.*5"),
    "bad-fraction": ("--max-bad-fraction 2", r"max.bad.fraction.*1.*2\.0"),
    "exclude": ("--exclude {data}/nowhere", "--exclude {data}/nowhere"),
    "gpu-and-no-gpu": ("--gpu --no-gpu", "--gpu .*--no-gpu"),
    "shuffle-block": ("--shuffle-block -1", "shuffle.block.*0.*-1"),
    "repeats": ("--repeats 0", "repeats.*at least 1.*0"),
    "repeats-of-less-than-two-batches": (
        "--repeats 12 --workers 1 --global-batch-size 64",
        "--repeats 12 .* 64 .*1,437 samples.* 11",
    ),
    "repeats-of-blocks-apart": ("--repeats 2 --shuffle-block 32 --shuffle-apart", "--repeats 2 .*--no-shuffle-apart"),
    "class-sampling": ("--class-sampling even", "--class-sampling .*balanced, sqrt .*even"),
    "class-sampling-of-repeats": ("--class-sampling sqrt --repeats 2", "--class-sampling .*--repeats 2"),
    "track-tensorboard": ("--track tensorboard", "--track tensorboard .*tensorboard/"),
    # Storage
    "name": ("--name a/b", "--name 'a/b'"),
    "storage-below-a-file": ("--storage {data}/file", "--storage {data}/file"),
    "storage-in-proc": ("--storage /proc/raydali", "--storage /proc/raydali"),
    "storage-that-does-not-answer": ("--storage s3://bucket/runs", "s3://bucket/runs.*[Cc]onnect"),
}


class RunsCode:
    """Its pickle creates the file `executed` in the current folder when it is loaded."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders that are taken for data; nobody looks into the images."""
    root = tmp_path_factory.mktemp("data")
    grow(root, ["file", *(f"folders/{split}/{name}/1.jpg" for split in ("train", "val") for name in ("cat", "dog"))])
    torch.save({"0.weight": RunsCode()}, root / "code.pth")
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
