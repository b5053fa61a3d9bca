"""The README: every command in it is known here, and is run as it stands there, by a user with an empty home."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jobs import detection, restoration, segmentation, video
from jobs.imagenet import DIGITS, Config
from raydali.data.builtin.digits import digits_folder
from raydali.data.index.labeled import LabeledFiles
from raydali.measure.records import RankRecord
from raydali.options.defaults import resolve
from raydali.run.folder import RunFolder
from tests.support.cluster import ROOT, committed, descendants, environment, head, kill, wait_until_gone
from tests.support.messages import mentions
from tests.support.records import epoch_line, rank_record

README, FILES, CLUSTERS, PAGE, MODELS = (
    (ROOT / name).read_text()
    for name in (
        "README.md",
        *(f"docs/{page}.md" for page in ("run-folder", "clusters", "fine-tuning", "trained-models")),
    )
)

MAKE = {"make demo", "make test"}
"""What a test cannot run inside a test; tests/cluster/test_local_run.py runs the demo."""
BENCH = (
    "raydali bench loader --gpus 0 --make 256 --batch-size 64 --threads 2 --workers 2 --repeats 1",
    "raydali bench train --gpus 0 --make 256 --batch-size 16 --models resnet18 --steps 3",
)
ACTIVATE = "source .venv/bin/activate"
TRAIN = "python jobs/imagenet.py --data ~/pets --name pets --model resnet18 --epochs 10 --batch-size 32"
TUNE = (
    "raydali train imagenet --data ~/pictures --model mobilenet_v2 --weights ~/mobilenet_v2-b0353104.pth --name tuned"
)
"""As on the page on fine-tuning, which tests/test_fine_tuning_page.py follows."""
USE = (
    "raydali evaluate ~/raydali-runs/tuned",
    "raydali predict ~/raydali-runs/tuned ~/new-pictures -o ~/predictions.csv",
)
"""As on the page on trained models, which tests/test_trained_models_page.py follows."""
HELP = "python jobs/imagenet.py --help"
PREVIEW = "raydali preview --data ~/pets --workers 2 -o ~/sheet.png"
RESUME = f"{TRAIN} --workers 1"
CLUSTER = ("raydali cluster up", "raydali cluster status", "raydali cluster down")
DOCTOR = "raydali doctor"
REPORT = "raydali report ~/raydali-runs/pets"
TOKEN = ("ray get-auth-token --generate", "chmod 600 ~/.ray/auth_token")
SUBMIT = "ray job submit --working-dir . -- " + TRAIN.replace(
    "--data ~/pets", "--data s3://my-bucket/pets --storage s3://my-bucket/runs"
)


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def table(heading: str) -> list[str]:
    """The first column of the table of a run's files, or of their fields, without its marks."""
    rows = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", FILES, re.MULTILINE)
    assert rows, heading
    return re.findall(r"^\| (.*?) \|", rows[1], re.MULTILINE)


def test_every_command_is_known() -> None:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines), lines
    commands = {line.removeprefix("$ ") for line in lines}
    assert commands == MAKE | {ACTIVATE, TUNE, *USE, TRAIN, HELP, PREVIEW, RESUME, *BENCH, *CLUSTER, DOCTOR, REPORT}
    assert lines[:2] == ["$ make demo", "$ make test"]
    assert {f"$ {command}" for command in (*TOKEN, SUBMIT)} <= {*CLUSTERS.splitlines()}


def test_make_knows_the_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)\b", "\n".join(re.findall(r"`[^`]+`", README)))) <= targets
    assert {command.removeprefix("make ") for command in MAKE} <= targets


def test_what_is_linked_exists() -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_the_job_has_the_options() -> None:
    jobs = (Config, detection.Config, restoration.Config, segmentation.Config, video.Config)
    known = {field.name.replace("_", "-") for config in jobs for field in fields(config)}
    known |= {f"no-{field.name}" for field in fields(Config) if field.type in (bool, bool | None)}
    of_others = {"help", "help-all", "cluster"}  # tyro's, and the doctor's
    of_others |= {*re.findall(r" --([a-z-]+)", " ".join(BENCH)), "json"} - known
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z-]*)", README + FILES))
    assert named - known == of_others
    defaults = {"model": "resnet50", "image-size": 224, "epochs": 90, "batch-size": 256}
    for name, value in defaults.items():
        assert f"`--{name} {value}`" in README
        assert getattr(resolve(Config(), {}), name.replace("-", "_")) == value
    assert f"`--storage` is `{Config().storage}`" in " ".join(README.split())


def test_the_demo_is_the_one_shown() -> None:
    (shown,) = blocks("text")
    train, val = (len(LabeledFiles.scan(f"{digits_folder()}/{split}")) for split in ("train", "val"))
    steps = DIGITS.epochs * train // (2 * DIGITS.batch_size)
    assert mentions(shown, f"{train:,} {val} 10 classes")
    assert mentions(shown, f"step 0 {steps} 2 workers")
    assert re.findall(r"^ +(\d+) +\d+ ", shown, re.MULTILINE) == ["0", str(DIGITS.epochs - 1)]
    assert max(map(len, shown.splitlines())) <= 170  # the run's folder and its scores, or its name twice


def test_the_fields_of_a_line_are_explained() -> None:
    validation = dict.fromkeys(("images", "loss", "top1", "top5", "seconds"), 0)
    record = epoch_line([rank_record()], validation=validation)
    of_line, of_rank = set(record), {field.name for field in fields(RankRecord)}

    line, _ = blocks("json", FILES)
    shown = set(re.findall(r'"(\w+)":', line))
    explained = {name for cell in table("Field") for name in re.findall(r"`(\w+)`", cell)}
    assert shown <= of_line | of_rank | set(validation)
    assert explained <= of_line
    assert shown & of_line <= explained | {"epoch"}


# ---------------------------------------------------------------------------------------------------------------------
# Every command, as it stands there


def test_fine_tuning_is_that_of_its_page() -> None:
    (command,) = re.findall(r"^\$ (raydali train .* --name pictures)$", PAGE, re.MULTILINE)
    assert command.replace("--name pictures", "--name tuned") == TUNE
    assert {f"$ {use.replace('/tuned', '/pictures')}" for use in USE} <= {*MODELS.splitlines()}


def write_pets(root: Path) -> None:
    """80 JPEGs of cats and dogs to train on and 24 to validate, 320x240 pixels, as far as a network can tell."""
    random = np.random.default_rng(0)
    for split, images in (("train", 40), ("val", 12)):
        for channel, label in enumerate(("cat", "dog")):
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in range(images):
                blobs = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                blobs[..., channel] //= 4
                image = Image.fromarray(blobs).resize((320, 240), Image.Resampling.BICUBIC)
                image.save(folder / f"{number}.jpg", quality=90)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".venv/bin/activate").exists():
        pytest.skip("needs the .venv that make setup makes")
    home = tmp_path_factory.mktemp("readme") / "home"
    home.mkdir()
    write_pets(home / "pets")
    return home


@pytest.fixture
def env(home: Path) -> dict[str, str]:
    return environment(home) | {"COLUMNS": "120"}


@contextmanager
def shell(command: str, env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a shell as a terminal starts it: in the repository, and in a process group of its own."""
    line = ["bash", "-c", f"{ACTIVATE}\n{command}"]
    with log.open("wb") as output:
        process = subprocess.Popen(line, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        kill([process.pid, *descendants(process.pid)] if process.poll() is None else [])


def run(command: str, env: dict[str, str], log: Path, timeout: float = 240) -> tuple[int, str]:
    """The exit code and the output of a command."""
    with shell(command, env, log) as process:
        return process.wait(timeout), log.read_text()


def assert_as_shown(output: str, *, finished: str) -> None:
    """The lines are the demo's in the README but for figures, and for top-5, which two classes do not have."""

    def form(text: str) -> str:
        # A dash: a value that was not measured.
        return re.sub(r"\d[\d.,]*(e-\d+)?%?|(?<= )-(?= )", "0", " ".join(text.split()))

    lines = output.splitlines()
    _, counted, _, _, _, _, started, header, epoch, *_ = blocks("text")[0].splitlines()
    counted, lines = re.sub(": '.*", "", counted), [re.sub(": '.*", "", line) for line in lines]  # names of classes
    for line in (counted, started, epoch.rpartition(" ")[0]):
        assert form(line) in map(form, lines), output
    assert header.replace("  top-5", "") in lines, output
    assert lines[-1].startswith(f"finished: {finished}: "), output


IF_ASKED_FOR = "samples", "traces", "tracking", "evaluation", "compile_cache"


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
def test_training_interrupting_and_resuming_on_your_own_data(home: Path, env: dict[str, str], tmp_path: Path) -> None:
    code, output = run(HELP, env, tmp_path / "help")
    assert code == 0 and "--data" in output
    code, output = run(PREVIEW, env, tmp_path / "preview")
    assert code == 0 and "16 ids, none twice" in output, output
    assert Image.open(home / "sheet.png").width > 1000

    folder = RunFolder(str(home / "raydali-runs"), "pets")
    with shell(TRAIN, env, tmp_path / "train") as process:
        deadline = time.monotonic() + 240
        while not committed(folder):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "train").read_text()
            time.sleep(0.1)
        below = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # Ctrl+C
        assert process.wait(120) == 130, (tmp_path / "train").read_text()
    assert not wait_until_gone(below)
    assert (tmp_path / "train").read_text().endswith("the same command with --name pets resumes it\n")

    code, output = run(RESUME, env, tmp_path / "resume")
    assert code == 0, output
    assert re.search(r"^resumed at step [1-9]\d* of 12: 1 worker on cpu", output, re.MULTILINE), output
    assert_as_shown(output.replace("resumed", "started").replace("1 worker on", "2 workers on"), finished=str(folder))
    rows = folder.rows("epochs.jsonl")
    assert rows[-1]["samples_consumed"] == 12 * 64 and sum(row["images"] for row in rows) == 12 * 64
    events = [row["event"] for row in folder.rows("events.jsonl")]
    assert [event for event in events if event != "ceiling"] == [  # measured again under load
        "chosen",
        "rehearsal",
        "start",
        "checkpoint",
        "left",
        "interrupt",
        "resume",
        "finish",
    ]
    for file in table("File"):
        if not any(name in file for name in IF_ASKED_FOR):
            assert list(Path(folder.path()).glob(file.strip("`"))), file

    code, output = run(REPORT, env, tmp_path / "report")
    assert code == 0 and "resume" in Path(folder.path("report.html")).read_text(), output

    code, output = run(TRAIN, env, tmp_path / "again")
    assert code == 0 and mentions(output.splitlines()[-1], "finished"), output
    code, output = run(TRAIN.replace("resnet18", "resnet34"), env, tmp_path / "other")
    assert code == 2 and mentions(output.splitlines()[-1], "resnet18 resnet34"), output


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(1200)
def test_measuring(env: dict[str, str], tmp_path: Path) -> None:
    for command, header in zip(BENCH, ("/ torchvision", "real / ceiling"), strict=True):
        code, output = run(command, env, tmp_path / "bench", timeout=600)
        assert code == 0 and header in output, output


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(400)
def test_a_cluster_on_one_machine_and_its_doctor(env: dict[str, str], tmp_path: Path) -> None:
    up, status, down = CLUSTER
    try:
        code, output = run(up, env, tmp_path / "up")
        assert code == 0 and "to use it, run: source " in output, output
        code, output = run(status, env, tmp_path / "status")
        assert code == 0, output
    finally:
        code, output = run(down, env, tmp_path / "down")
    assert code == 0, output
    code, output = run(DOCTOR, env, tmp_path / "doctor")
    assert code in (0, 1) and "Remedy" in output.replace("remedy", "Remedy"), output


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
def test_submitting_to_a_cluster_behind_a_token(
    home: Path,
    env: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from moto.server import ThreadedMotoServer

    caplog.set_level("WARNING", "werkzeug")  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        env["AWS_ENDPOINT_URL"] = "http://{}:{}".format(*server.get_host_and_port())
        env |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        upload(home / "pets", env)
        for command in TOKEN:
            code, output = run(command, env, tmp_path / "token")
            assert code == 0, output
        assert (home / ".ray/auth_token").stat().st_mode & 0o777 == 0o600
        env["RAY_AUTH_MODE"] = "token"
        with head(env, tmp_path / "head") as address:
            code, output = run(SUBMIT, env | {"RAY_ADDRESS": address}, tmp_path / "submit", timeout=600)
            assert code == 0, output
            told = re.search("^data: 80 training.*^finished: .*?$", output, re.DOTALL | re.MULTILINE)
            assert told, output
            assert_as_shown(told[0], finished="s3://my-bucket/runs/pets")
            other = SUBMIT.replace("resnet18", "resnet34")
            code, output = run(other, env | {"RAY_ADDRESS": address}, tmp_path / "refused")
            assert code == 1 and mentions(output, "resnet18 resnet34"), output
        for name, value in env.items():
            if name.startswith("AWS_"):
                monkeypatch.setenv(name, value)
        rows = RunFolder("s3://my-bucket/runs", "pets").rows("epochs.jsonl")
        assert rows[-1]["samples_consumed"] == 12 * 64
    finally:
        server.stop()


def upload(folder: Path, env: dict[str, str]) -> None:
    """A folder's files to the bucket of the README."""
    import boto3

    options = {"aws_access_key_id": env["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": env["AWS_SECRET_ACCESS_KEY"]}
    client = boto3.client("s3", endpoint_url=env["AWS_ENDPOINT_URL"], region_name="us-east-1", **options)
    client.create_bucket(Bucket="my-bucket")
    for file in folder.rglob("*.jpg"):
        client.put_object(Bucket="my-bucket", Key=str(file.relative_to(folder.parent)), Body=file.read_bytes())
