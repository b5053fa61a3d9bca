"""`raydali predict`: each sample once, whatever happens on the way."""

import csv
import errno
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pyarrow import parquet

from jobs import imagenet
from raydali.commands import evaluate, predict
from raydali.commands.evaluate import Evaluate
from raydali.commands.predict import Predict
from raydali.data.builtin.digits import digits_folder
from raydali.errors import CommandError, DataError, UsageError
from raydali.host.hardware import has_bf16
from raydali.inference import predictions, workers
from raydali.inference.job_module import load_job
from raydali.inference.samples import unlabeled_samples
from raydali.inference.trained_run import open_run
from raydali.run import local_files
from raydali.run.folder import RunFolder
from tests.support.cluster import ROOT
from tests.support.messages import mentioning
from tests.support.trained_runs import made_run

CLASSES = [*map(str, range(10))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run on the digits."""
    return made_run(tmp_path_factory.mktemp("runs"), imagenet, imagenet.DIGITS, CLASSES)


@pytest.fixture(name="digits")
def digits_(tmp_path: Path) -> list[Path]:
    """Some digits in a folder of folders, sorted."""
    files = sorted(Path(digits_folder(), "val").glob("*/*"))[::4]
    for file in files:
        (tmp_path / "digits" / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / "digits" / file.parent.name)
    return sorted((tmp_path / "digits").glob("*/*"))


def options(run: RunFolder, data: Path | str, output: Path, **given: Any) -> Predict:
    return Predict(run=str(run), data=str(data), output=str(output), **{"batch_size": 4, **given})


def rows(output: Path) -> list[dict[str, Any]]:
    if output.suffix == ".parquet":
        found: list[dict[str, Any]] = parquet.read_table(output).to_pylist()
        return found
    with output.open(newline="") as file:
        return [*csv.DictReader(file)]


def paths(output: Path) -> list[str]:
    return [row["path"] for row in rows(output)]


def names(files: Sequence[Path]) -> list[str]:
    return [*map(str, files)]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_each_file_has_a_row_in_the_order_of_the_listing(
    run: RunFolder, digits: list[Path], tmp_path: Path, ending: str
) -> None:
    output = tmp_path / f"predictions.{ending}"
    predict.main(options(run, tmp_path / "digits", output))
    assert paths(output) == names(digits)
    for row in rows(output):
        labels = [row["label"], *(row[f"label_{place}"] for place in range(2, 6))]
        probabilities = [float(row["probability"]), *(float(row[f"probability_{place}"]) for place in range(2, 6))]
        assert len({*labels}) == 5 and {*labels} <= {*CLASSES}
        assert probabilities == sorted(probabilities, reverse=True) and 0 < sum(probabilities) <= 1 + 1e-6
    assert {path.name for path in tmp_path.iterdir()} == {"digits", output.name}


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "0"), pytest.param({"OMP_WAIT_POLICY": "active"}, "30000000000", marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_threads_sleep_while_they_wait(
    run: RunFolder, digits: list[Path], tmp_path: Path, given: dict[str, str], spins: str
) -> None:
    others = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment = (
        others | {"PYTHONPATH": str(ROOT), "OMP_DISPLAY_ENV": "verbose", "PYTHONPROFILEIMPORTTIME": "1"} | given
    )
    command = [sys.executable, "-m", "raydali.cli", "predict", str(run), str(tmp_path / "digits"), "-o"]
    found = subprocess.run([*command, str(tmp_path / "p.csv")], env=environment, stderr=subprocess.PIPE, text=True)
    assert f"GOMP_SPINCOUNT = '{spins}'" in found.stderr
    assert "torchvision.ops" in found.stderr
    assert not re.search("torch._dynamo|sympy", found.stderr), "imports that take a quarter of the CPU time"
    assert paths(tmp_path / "p.csv") == names(digits)


@pytest.mark.usefixtures("digits")
def test_pytorch_starts_no_more_threads_than_there_are_cores(run: RunFolder, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        predict.main(options(run, tmp_path / "digits", tmp_path / "p.csv", cpus_per_worker=1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_broken_files_are_in_a_list_of_their_own(run: RunFolder, digits: list[Path], tmp_path: Path) -> None:
    digits[3].write_bytes(b"")
    digits[50].write_bytes(digits[50].read_bytes()[:200])
    for file in digits[8:12]:  # a whole batch, and part
        file.write_bytes(b"no image")
    output = tmp_path / "p.csv"
    with pytest.raises(CommandError, match=mentioning(f"6 images {output}.broken.csv {digits[3]}")):
        predict.main(options(run, tmp_path / "digits", output))
    broken = [digits[3], *digits[8:12], digits[50]]
    assert paths(output) == [name for name in names(digits) if name not in names(broken)]
    told = rows(tmp_path / "p.csv.broken.csv")
    assert [row["path"] for row in told] == names(broken) and all(row["reason"] for row in told)


def test_the_precision_is_said_and_fp32_is_exact(
    tmp_path: Path, digits: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in bf16: in fp32 it answers as its network, and so as an exported file."""
    config = replace(imagenet.DIGITS, precision="bf16")
    run = made_run(tmp_path, imagenet, config, CLASSES)
    own = "bf16" if has_bf16(torch.device("cpu")) else "fp32"
    predict.main(options(run, tmp_path / "digits", tmp_path / "own.csv"))
    assert f" in {own}" in capsys.readouterr().out
    predict.main(options(run, tmp_path / "digits", tmp_path / "fp32.csv", precision="fp32"))
    assert " in fp32" in capsys.readouterr().out
    opened = open_run(str(run))
    source, _ = unlabeled_samples(opened, str(tmp_path / "digits"))
    pixels = torch.stack([opened.pipeline.sample(source, id, 0)[0] for id in range(len(digits))])
    with torch.inference_mode():
        wanted = opened.network(10)(pixels).softmax(1).max(1).values
    exact = [float(row["probability"]) for row in rows(tmp_path / "fp32.csv")]
    assert exact == pytest.approx(wanted.tolist(), abs=1e-5)


ODD = os.fsdecode(b"0\xff"), "1\x1b[31m", "2\n3"
"""Names that are not UTF-8, that a terminal obeys, and of two lines."""
SHOWN = "0\\xff", "1\\x1b[31m", "2\\n3"


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_odd_names_of_files_and_classes(
    tmp_path: Path, digits: list[Path], capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    run = made_run(tmp_path, imagenet, imagenet.DIGITS, [*ODD, *"3456789"])
    data = tmp_path / os.fsdecode(b"data\xfe")
    for name, file in zip(ODD, digits, strict=False):
        (data / name).mkdir(parents=True)
        file.rename(data / name / f"{name}.jpg")
        (data / name / f"broken {name}.jpg").write_bytes(b"no image")
    shown = [f"{tmp_path}/data\\xfe/{name}/{{}}{name}.jpg" for name in SHOWN]
    output = tmp_path / f"p.{ending}"
    with pytest.raises(CommandError, match="3 images"):
        predict.main(options(run, data, output))
    assert paths(output) == [path.format("") for path in shown]
    assert {row["label"] for row in rows(output)} <= {*SHOWN, *"3456789"}
    assert paths(tmp_path / f"p.{ending}.broken.csv") == [path.format("broken ") for path in shown]

    with pytest.raises(CommandError, match="3 images"):
        evaluate.main(Evaluate(run=str(run), data=str(data)))
    said = capsys.readouterr().out
    assert "\x1b" not in said and all(name in said for name in SHOWN) and shown[2].format("broken ") in said
    found = run.read_json("evaluation.json")
    assert [each["path"] for each in found["broken"]] == [f"{data}/{name}/broken {name}.jpg" for name in ODD]
    assert [row["class"] for row in found["classes"]][:3] == [*ODD]
    page = run.read("report.html").decode()
    assert "\x1b" not in page and SHOWN[0] in page and SHOWN[1] in page
    assert run.read("worst.png").startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_terminal_is_shown_printable_names(tmp_path: Path) -> None:
    """The command itself, for a strict terminal of ASCII: warnings, and the error."""
    data = tmp_path / os.fsdecode(b"data\xff")
    for name in ODD:
        (data / name).mkdir(parents=True)
        (data / name / f"{name}\u00e9.jpg").write_bytes(b"no image")
    (data / "\x1bempty").mkdir()
    command = [sys.executable, "-m", "raydali.cli", "verify", str(data)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:strict"}
    ended = subprocess.run(command, env=environment, capture_output=True)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1 and b"Traceback" not in said and b"\x1b" not in said
    for name in SHOWN:
        assert f"data\\xff/{name}/{name}\\xe9.jpg".encode() in ended.stdout
    assert b"\\x1bempty" in ended.stderr


def test_nothing_can_be_read(run: RunFolder, digits: list[Path], tmp_path: Path) -> None:
    for file in digits:
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match=mentioning(f"{names(digits)[0]} verify")):
        predict.main(options(run, tmp_path / "digits", tmp_path / "p.csv"))
    assert not (tmp_path / "p.csv").exists()
    assert len(rows(tmp_path / "p.csv.broken.csv")) == len(digits)


def test_a_full_disk_costs_only_the_part_under_way(
    run: RunFolder, digits: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, replaced, done, limit = tmp_path / "p.csv", local_files.replace, list[Path](), 0
    begun, results = workers.results, list[Any]()

    def limited(path: Path, contents: bytes | memoryview) -> None:
        if len(done) == limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replaced(path, contents)
        done.append(path)

    def noted(*args: Any) -> Any:
        results.append(begun(*args))
        return results[-1]

    monkeypatch.setattr(local_files, "replace", limited)
    monkeypatch.setattr(workers, "results", noted)
    for stop in (5, 6, 19):
        limit = stop
        with pytest.raises(CommandError, match="No space left"):
            predict.main(options(run, tmp_path / "digits", output))
        assert not output.exists()
        assert inspect.getgeneratorstate(results[-1]) == inspect.GEN_CLOSED, "with its loader"
    limit = 1000
    predict.main(options(run, tmp_path / "digits", output))
    assert paths(output) == names(digits)
    assert len(done) == len({*done}), "no part was done twice"


def test_the_same_rows_after_an_interruption(run: RunFolder, digits: list[Path], tmp_path: Path) -> None:
    """But not of other images under the same names."""
    predict.main(options(run, tmp_path / "digits", tmp_path / "whole.csv"))
    command = options(run, tmp_path / "digits", tmp_path / "p.csv")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        write_part = predictions.Predictions.write_part
        written = list[int]()

        def interrupted(self: predictions.Predictions, result: Any, *rest: Any) -> None:
            if len(written) == 7:
                raise KeyboardInterrupt
            written.append(result.part.number)
            write_part(self, result, *rest)

        patch.setattr(predictions.Predictions, "write_part", interrupted)
        predict.main(command)
    contents = [path.read_bytes() for path in digits]
    for path, content in zip(digits, reversed(contents), strict=True):
        path.write_bytes(content)
    with pytest.raises(UsageError, match=mentioning("p.csv.parts (samples)")):
        predict.main(command)
    for path, content in zip(digits, contents, strict=True):
        path.write_bytes(content)
    predict.main(command)
    assert (tmp_path / "p.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_parts_of_another_command_are_refused(run: RunFolder, digits: list[Path], tmp_path: Path) -> None:
    other = made_run(tmp_path, imagenet, imagenet.DIGITS, CLASSES, name="other", seed=1)
    output = tmp_path / "p.csv"
    predictions.Predictions(output, {"run": "an earlier one", "weights": "0"})
    for asked in (run, other):
        with pytest.raises(UsageError, match=mentioning(f"{output}.parts (run, weights")):
            predict.main(options(asked, tmp_path / "digits", output))
    shutil.rmtree(f"{output}.parts")
    predict.main(options(run, tmp_path / "digits", output))
    before = output.read_bytes()
    with pytest.raises(UsageError, match=mentioning(str(output))):
        predict.main(options(other, tmp_path / "digits", output))
    assert output.read_bytes() == before
    digits[0].unlink()
    (tmp_path / "p.csv.parts").mkdir()
    (tmp_path / "p.csv.parts/identity.json").write_text("{")
    output.unlink()
    with pytest.raises(UsageError, match=mentioning(f"{output}.parts")):
        predict.main(options(run, tmp_path / "digits", output))


def test_lists(run: RunFolder, digits: list[Path], tmp_path: Path) -> None:
    chosen = [digits[5], digits[2], digits[2], digits[70]]
    (tmp_path / "some.txt").write_text("".join(f"{file.relative_to(tmp_path)}\n" for file in chosen))
    predict.main(options(run, tmp_path / "some.txt", tmp_path / "p.csv"))
    assert paths(tmp_path / "p.csv") == names(chosen)
    lines = (f'"{file.relative_to(tmp_path / "digits")}",7,x\n' for file in chosen)
    (tmp_path / "table.csv").write_text("\ufeffpath,label,other\n" + "".join(lines) + "\nno/such.jpg,1,y\n")
    with pytest.raises(CommandError, match=mentioning(f"1 image {tmp_path}/q.csv.broken.csv such.jpg")):
        predict.main(options(run, tmp_path / "table.csv", tmp_path / "q.csv", root=str(tmp_path / "digits")))
    assert paths(tmp_path / "q.csv") == names(chosen)
    assert [row["path"] for row in rows(tmp_path / "q.csv.broken.csv")] == [str(tmp_path / "digits/no/such.jpg")]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"output": "p.png"}, "p.png"),
        ({"output": "folder"}, "folder"),
        ({"output": "no/such/p.csv"}, "no/such/p.csv"),
        ({"data": "nowhere"}, "nowhere"),
        ({"data": "empty"}, "empty"),
        ({"data": "empty.txt"}, "empty.txt"),
        ({"root": "digits"}, "digits"),
        ({"run": "nowhere"}, "nowhere"),
        ({"run": "digits"}, "digits"),
        ({"batch_size": 0}, "0"),
        ({"workers": "0"}, "0"),
        ({"job": "imagenot"}, "imagenot"),
    ],
)
@pytest.mark.usefixtures("digits")
def test_bad_usage_is_one_line(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n")
    before = {*tmp_path.iterdir()}
    with pytest.raises(UsageError, match=mentioning(named)):
        predict.main(replace(options(run, "digits", Path("p.csv")), **given))
    assert {*tmp_path.iterdir()} == before, "nothing is left behind"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_ten_instants(run: RunFolder, tmp_path: Path) -> None:
    """SIGKILL at a different number of finished parts each time; nothing is done twice, nothing is missing."""
    data, output = Path(digits_folder(), "train"), tmp_path / "p.csv"
    command = [sys.executable, "-m", "raydali.cli", "predict", str(run), str(data), "-o", str(output)]
    parts, seen = tmp_path / "p.csv.parts", dict[str, int]()
    for kill in range(10):
        process = subprocess.Popen([*command, "--batch-size", "4"], stdout=subprocess.DEVNULL)
        while process.poll() is None and len([*parts.glob("part-*")]) < 7 * kill + 1:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for file in parts.glob("part-*.parquet"):
            assert seen.setdefault(file.name, file.stat().st_mtime_ns) == file.stat().st_mtime_ns
        assert not output.exists()
    subprocess.run([*command, "--batch-size", "4"], check=True)
    assert paths(output) == names(sorted(data.glob("*/*")))
    assert {path.name for path in tmp_path.iterdir()} == {"p.csv"}


MY_JOB = """
class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = torch.nn.Linear(3, classes)

    def forward(self, images):
        return self.layer(images.mean((2, 3)))


def build_model(config, classes):
    return Net(classes)


JOB = raydali.Job("""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("ray")
def test_the_parts_of_a_worker_that_dies_are_done_by_others(tmp_path: Path) -> None:
    """The model is of a class in a job of the user."""
    text = Path(imagenet.__file__).read_text().replace("JOB = raydali.Job(", MY_JOB)
    (tmp_path / "my_job.py").write_text(text.replace("from functools", "import torch\nfrom functools", 1))
    job = load_job(tmp_path / "my_job.py")
    run = made_run(tmp_path, sys.modules[job.config.__module__], job.demo, CLASSES)
    data, output = Path(digits_folder(), "train"), tmp_path / "p.csv"
    command = [sys.executable, "-m", "raydali.cli", "predict", str(run), str(data), "-o", str(output)]
    process = subprocess.Popen(
        [*command, "--batch-size", "4", "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    while process.poll() is None and len([*(tmp_path / "p.csv.parts").glob("part-*")]) < 3:
        time.sleep(0.001)
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if "InferenceWorker" in " ".join(child.cmdline())]
    assert len(workers) == 2
    workers[0].kill()
    _, errors = process.communicate()
    assert process.returncode == 0 and "worker" in errors
    assert paths(output) == names(sorted(data.glob("*/*")))
