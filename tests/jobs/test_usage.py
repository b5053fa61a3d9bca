"""Bad usage of a job: exit code 2 within seconds, an error that names the value and the remedy, nothing left behind."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from raydali.launch.driver.ray_cluster import WORKERS_PER_CORE
from tests.support.ranks import context

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))

REMEDY = r"must |write |only |at least|lie in|try |lower |raise |give |use |needs? |ask for|such as|check |--help"

# Arguments after --name, and what the error must name; {data} is a folder of data sets, {cores} the machine's cores.
CASES = {
    # The data
    "data-missing": ("--data {data}/nowhere", "{data}/nowhere does not exist"),
    "data-a-file": ("--data {data}/file", "--data {data}/file lists training images alone: give --val-data"),
    "data-an-empty-list": ("--data {data}/file --val-data {data}/file", "{data}/file lists no files: write a line"),
    "val-data-alone": ("--val-data {data}/file", "--val-data {data}/file needs the training images too: give --data"),
    "root-without-lists": ("--data {data}/differing --root {data}", "--root {data} is of no use to {data}/differing"),
    "data-without-train": ("--data {data}/no-train", "{data}/no-train holds no train/: give the folder that"),
    "data-without-val": ("--data {data}/no-val", "{data}/no-val holds train/ but no val/: give --data"),
    "data-without-classes": ("--data {data}/no-classes", "{data}/no-classes/train holds no class folders"),
    "data-without-images": ("--data {data}/no-images", "no images in the 2 class folders of {data}/no-images/train"),
    "data-of-other-classes": ("--data {data}/differing", "{data}/differing/val lacks 'dog' and has besides 'cow'"),
    "data-of-an-unknown-kind": ("--data ftp://host/data", "cannot read ftp://host/data"),
    "shards-alone": ("--data {data}/0.tar", "0.tar names training shards alone: give --val-data"),
    "shards-missing": ("--data {data}/{{0..1}}.tar --val-data {data}/0.tar", "2 of the 2 files .* are missing"),
    "tfrecord": ("--data {data}/train-*-of-00010", "-of-00010 names training shards alone: give --val-data"),
    # What no option takes
    "unknown-option": ("--batchsize 32", "Unrecognized options: --batchsize, 32.*--batch-size"),
    "stray-word": ("32", "Unrecognized .*32"),
    "word-for-a-number": ("--epochs ten", "--epochs.*'ten'"),
    "fraction-for-a-whole-number": ("--batch-size 1.5", "--batch-size.*'1.5'"),
    "word-for-a-fraction": ("--learning-rate fast", "--learning-rate.*'fast'"),
    "one-number-for-two": ("--random-area 0.5", "--random-area"),
    "precision": ("--precision fp8", "'fp8'.*--precision(?=.*'bf16')(?=.*'fp16')(?=.*'fp32')"),
    "loader": ("--loader tf", "'tf'.*--loader.*'dali', 'torch', 'synthetic'"),
    "model": ("--model resnet51", "resnet51.*resnet50"),
    "model-of-another-size": (
        "--model vit_b_16 --image-size 40 --resize-size 40",
        "vit_b_16 .* 40 x 40 .*patch.*try --image-size 32",
    ),
    # Workers
    "no-workers": ("--workers 0", "--workers 0.*at least 1"),
    "workers-of-a-word": ("--workers x", "--workers x .*MIN:MAX"),
    "workers-reversed": ("--workers 3:2", "--workers 3:2"),
    "workers-beyond-the-machine": ("--workers {too_many}", "{too_many} workers.* {cores} cores.*--workers"),
    "no-cpus": ("--cpus-per-worker 0", "cpus.per.worker.*at least 1.*0"),
    "failures": ("--max-failures -2", "max.failures.*-2"),
    "sync-bn-on-cpus": ("--sync-bn --no-gpu", "--sync-bn.*GPU"),
    # Sizes
    # With one epoch, which no default of the warm-up may refuse.
    "global-batch-no-multiple": ("--global-batch-size 40 --epochs 1", "global.batch.size 40.*batch.size 32.*64"),
    "global-batch-of-nothing": ("--global-batch-size 0", "global.batch.size.*0"),
    "batch-of-nothing": ("--batch-size 0", "batch.size.*0"),
    "fewer-samples-than-a-batch": ("--global-batch-size 2048 --batch-size 2048", "1437 samples.* 2048.*--batch-size"),
    "no-epochs": ("--epochs 0", "epochs.*at least 1.*0"),
    "image-of-nothing": ("--image-size 0", "image.size.*at least 1.*0"),
    "resize-below-image": ("--image-size 32 --resize-size 31", "resize.size.*31.*image.size.*32"),
    # Numbers out of their range
    "hardware-decoder": ("--hw-decoder-load 2", r"hw.decoder.load must lie in 0..1, not 2\.0"),
    "seed": ("--seed -1", "seed.*-1"),
    "random-area": ("--random-area 0 2", r"random.area.*\(0\.0, 2\.0\)"),
    "flip-probability": ("--flip-probability 2", "flip.probability.*2"),
    "learning-rate": ("--learning-rate -1", "learning.rate.*-1"),
    "learning-rate-nan": ("--learning-rate nan", "learning.rate.*nan"),
    "warmup": ("--epochs 3 --warmup-epochs 4", r"warmup.epochs.*below 3, not 4"),
    "warmup-negative": ("--warmup-epochs -1", "warmup.epochs.*-1"),
    "momentum": ("--momentum 1.5", r"momentum.*1\.5"),
    "weight-decay": ("--weight-decay -0.1", r"weight.decay.*-0\.1"),
    "label-smoothing": ("--label-smoothing 2", "label.smoothing.*2"),
    "mixup": ("--mixup -1", "mixup.*-1"),
    "cutmix": ("--cutmix -1", "cutmix.*-1"),
    "ema-decay": ("--ema-decay 1", "ema.decay.*1"),
    "checkpoint-every": ("--checkpoint-every -1", "checkpoint.every.*-1"),
    "hang-timeout": ("--hang-timeout 5", "--hang-timeout must be 0 or at least 10, not 5"),
    "start-timeout": ("--start-timeout 5", "--start-timeout must be 0 or at least 10, not 5"),
    "bad-fraction": ("--max-bad-fraction 2", r"max.bad.fraction must be .* below 1, not 2\.0"),
    "profile-steps": ("--profile-steps 5:2", "--profile-steps 5:2 is no A:B .* such as 100:110"),
    "exclude": ("--exclude {data}/nowhere", "--exclude {data}/nowhere cannot be read: .*; give a file"),
    "gpu-and-no-gpu": ("--gpu --no-gpu", "--gpu and --no-gpu exclude each other: give one of them"),
    "shuffle-block": ("--shuffle-block -1", "shuffle.block.*at least 0, not -1"),
    "track": ("--track tensorbard", "--track tensorbard must be a comma list of mlflow, wandb"),
    # Storage
    "name": ("--name a/b", "--name 'a/b'"),
    "storage-below-a-file": ("--storage {data}/file", "--storage {data}/file cannot be written"),
    "storage-in-proc": ("--storage /proc/raydali", "--storage /proc/raydali cannot be written"),
    "storage-of-an-unknown-kind": ("--storage ftp://host/runs", "--storage ftp://host/runs cannot be reached"),
    "storage-that-does-not-answer": ("--storage s3://bucket/runs", "s3://bucket/runs.*[Cc]onnect"),
}


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
    return root


@pytest.fixture
def no_ray(tmp_path: Path) -> Path:
    """A folder to import from in which Ray cannot be: starting it would take a person's time before the refusal."""
    module = tmp_path / "modules" / "ray.py"
    module.parent.mkdir()
    module.write_text("raise SystemExit('Ray was started before the refusal')\n")
    return module.parent


AWS = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "none",
}


def job(arguments: list[str], folder: Path, modules: list[Path]) -> None:
    """The job's script as a user starts it, in this process, which has imported torch: that takes most of a start."""
    for name in [name for name in os.environ if name.startswith(("RAY_", "AWS_"))]:
        del os.environ[name]
    os.environ.update(AWS)
    sys.path[:0] = map(str, modules)
    os.chdir(folder)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = [str(ROOT / "jobs/imagenet.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def refusal(arguments: list[str], storage: Path, *modules: Path) -> str:
    """The error, on one line; tyro's come in a box."""
    arguments = ["--storage", str(storage), "--name", "run", *arguments]
    process = context.Process(target=job, args=(arguments, storage.parent, list(modules)))
    process.start()
    process.join(280)
    process.kill()
    errors = (storage.parent / "stderr").read_text()
    output = (storage.parent / "stdout").read_text() + errors
    assert "Traceback" not in output, output
    assert process.exitcode == 2, output
    last = errors.splitlines()[-1]
    assert last.startswith(("error: ", "╰")), output
    assert not storage.exists(), sorted(storage.rglob("*"))
    said = last if last.startswith("error: ") else re.sub("[│╭╮╰╯─]", " ", errors)
    return " ".join(said.split())


@pytest.mark.parametrize("case", CASES)
def test_bad_usage_is_refused_before_ray_starts(case: str, data: Path, tmp_path: Path, no_ray: Path) -> None:
    figures = {"data": data, "cores": CORES, "too_many": WORKERS_PER_CORE * CORES + 1}
    arguments, named = (text.format(**figures) for text in CASES[case])
    said = refusal(arguments.split(), tmp_path / "runs", no_ray)
    assert re.search(named, said), said
    assert re.search(REMEDY, said), said


def test_more_workers_than_micro_batches_are_refused_early(tmp_path: Path) -> None:
    arguments = ["--global-batch-size", "32", "--batch-size", "32", "--workers", "2"]
    said = refusal(arguments, tmp_path / "runs")
    assert re.search(r"2 workers are more than the 1 micro-batches of a global batch \(32 / 32\).*fewer workers", said)
