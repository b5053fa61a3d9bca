"""This file tests what `import raydali` offers: to jobs, to copies of jobs, and to training loops of one's own."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import raydali
from raydali.data.broken.quarantine import Quarantine
from raydali.data.index.labeled import LabeledFiles
from tests.support import broken
from tests.support.cluster import ROOT, descendants, environment, kill
from tests.support.messages import mentioning
from tests.support.pictures import encoded, photograph
from tests.support.ranks import run_ranks

EXAMPLES = ROOT / "docs/examples"
BATCH, GLOBAL_BATCH, IMAGES, EPOCHS = 8, 32, 70, 3
STEPS = EPOCHS * IMAGES // GLOBAL_BATCH
PUBLIC = vars(raydali)["__all__"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of 70 photographs."""
    root = tmp_path_factory.mktemp("images")
    for i in range(IMAGES):
        file = root / ("cat", "dog")[i % 2] / f"{i:03}.jpg"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(encoded(photograph(("china", "flower")[i % 2], (60 + i, 80))))
    return root


def test_each_public_name_is_imported_when_it_is_asked_for() -> None:
    assert all(hasattr(raydali, name) for name in PUBLIC) and set(PUBLIC) <= set(dir(raydali))
    modules = {path.stem for path in (ROOT / "raydali").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert not modules & set(PUBLIC), "an import of such a module would take the place of the name"
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        raydali.Trainer  # type: ignore[attr-defined]  # noqa: B018
    script = "import raydali, sys; print(sorted({'numpy', 'ray', 'torch', 'nvidia'} & {*sys.modules}))"
    script += "; from raydali import Stream; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["[]", "False", ""]


def _stream(images: int = IMAGES) -> raydali.Stream:
    return raydali.Stream(samples=images, epochs=EPOCHS, batch_size=BATCH, global_batch_size=GLOBAL_BATCH, seed=0)


def _loader(folder: Path, *, rank: int = 0, world_size: int = 1, start: int = 0, **settings: Any) -> Any:
    where = {"rank": rank, "world_size": world_size, "start": start, **settings}
    images = raydali.labeled_images(str(folder))
    return raydali.make_loader("dali", images, raydali.TrainImages(image_size=16, seed=0), _stream(), **where)


def _loop(folder: Path, rank: int, world_size: int, start: int = 0, epochs: int = EPOCHS) -> dict[str, Any]:
    """Ids by step, records, and the state behind so many epochs."""
    ids: dict[int, list[int]] = {}
    records = []
    with _loader(folder, rank=rank, world_size=world_size, start=start) as loader:
        for number, epoch in enumerate(raydali.measured(loader), 1):
            steps = 0
            for batch in epoch:
                ids.setdefault(batch.micro_batch.step, []).extend(batch.ids.tolist())
                epoch.add(torch.tensor(float(rank)))
                steps += epoch.ends_step
            records.append((epoch.record(learning_rate=0.5), steps))
            if number == epochs:
                break
        return {"ids": ids, "records": records, "state": loader.state_dict()}


def _rank(folder: Path, start: int, epochs: int) -> dict[str, Any]:
    return _loop(folder, torch.distributed.get_rank(), torch.distributed.get_world_size(), start, epochs)


def test_epochs_and_records_are_equal_on_any_number_of_ranks(folder: Path) -> None:
    stream = _stream()
    expected = {
        step: {i for index in range(4) for i in stream.micro_batch(step, index).ids.tolist()} for step in range(STEPS)
    }
    two = run_ranks(2, _rank, folder, 0, 2)
    (state,) = {json.dumps(one["state"]) for one in two}
    start = stream.steps_of(json.loads(state))
    assert start == 5 and [record for record, _ in two[1]["records"]] == [None, None]
    one = _loop(folder, 0, 1, start)
    seen = {step: set(two[0]["ids"][step] + two[1]["ids"][step]) for step in range(start)}
    assert seen | {step: set(ids) for step, ids in one["ids"].items()} == expected

    records = [record for record, _ in two[0]["records"] + one["records"]]
    assert [record["epoch"] for record in records] == [0, 1, 2]
    assert [record["step"] for record in records] == [3, 5, 6]
    assert [record["images"] for record in records] == [96, 64, 32]
    assert [record["world_size"] for record in records] == [2, 2, 1]
    assert [steps for _, steps in two[0]["records"] + one["records"]] == [3, 2, 1]
    assert [record["loss"] for record in records] == [0.5, 0.5, 0.0]  # a rank's loss is its rank
    for record in records:
        assert record["learning_rate"] == 0.5 and record["ceiling_images_per_second"] is None
        assert [rank["rank"] for rank in record["ranks"]] == [*range(record["world_size"])]
        assert record["images_per_second"] == pytest.approx(record["images"] / record["seconds"])


def test_an_epoch_is_loader_waits_and_steps_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _loader(folder) as loader:
        batches = iter(loader)

        def slow(_: Any) -> Any:
            for batch in batches:
                time.sleep(0.02)
                yield batch

        monkeypatch.setattr(type(loader), "__iter__", slow)
        records, began = [], time.perf_counter()
        for epoch in raydali.measured(loader):
            for _ in epoch:
                time.sleep(0.01)
            time.sleep(0.5)
            records.append(epoch.record())
    passed = time.perf_counter() - began
    assert sum(record["seconds"] for record in records if record is not None) <= passed - 0.5 * len(records)
    for record in records:
        assert record is not None and record["loss"] is None
        taken = record["images"] // BATCH
        assert record["loader_wait_seconds"] >= 0.02 * taken and record["step_seconds"] >= 0.01 * taken
        assert record["seconds"] == pytest.approx(record["loader_wait_seconds"] + record["step_seconds"], abs=1e-3)


def _quarantined(folder: Path) -> list[Any]:
    where = {"rank": torch.distributed.get_rank(), "world_size": torch.distributed.get_world_size()}
    records = []
    with _loader(folder, **where, quarantine=lambda order: Quarantine(order.samples, seed=0)) as loader:
        for epoch in raydali.measured(loader):
            for batch in epoch:
                assert len(batch.ids) == BATCH
            records.append(epoch.record())
    return records


def test_substituted_images_are_counted_over_all_ranks(tmp_path: Path) -> None:
    damaged, stream = {3: "empty", 40: "text", 41: "cut-short"}, _stream()
    broken.folder(tmp_path, IMAGES, damaged)
    of_step = [
        sum(id in damaged for index in range(4) for id in stream.micro_batch(step, index).ids) for step in range(STEPS)
    ]
    expected = [sum(of_step[:3]), sum(of_step[3:5]), of_step[5]]
    records, _ = run_ranks(2, _quarantined, tmp_path)
    assert [record["quarantined"] for record in records] == expected
    assert [sum(rank["replaced"] for rank in record["ranks"]) for record in records] == expected


def test_a_folder_of_train_and_val_is_not_taken_for_two_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "1.jpg").write_bytes(encoded(photograph()))
    with pytest.raises(raydali.UsageError, match=mentioning(f"train val classes {tmp_path}/train")):
        raydali.labeled_images(str(tmp_path))
    assert raydali.labeled_images(f"{tmp_path}/train").classes == ("cat",)


def test_what_cannot_be_measured_is_refused(folder: Path) -> None:
    with (
        _loader(folder, world_size=3) as loader,
        pytest.raises(raydali.UsageError, match=mentioning("3 workers 4")),
    ):
        raydali.measured(loader)
    order = raydali.OrderedPass(samples=IMAGES, batch_size=BATCH)
    images, centre = LabeledFiles.scan(str(folder)), raydali.ValidationImages(image_size=16, resize_size=16)
    with (
        raydali.make_loader("dali", images, centre, order) as loader,
        pytest.raises(TypeError, match="not OrderedPass"),
    ):
        raydali.measured(loader)


# ---------------------------------------------------------------------------------------------------------------------
# The jobs and the examples


def _python() -> dict[str, str]:
    """The Python that a user copies, by where it stands: jobs, examples, and blocks of pages."""
    files = [*(ROOT / "jobs").glob("*.py"), *EXAMPLES.glob("*.py")]
    texts = {file.name: file.read_text() for file in files}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        blocks = re.findall(r"^```(?:py|python)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        texts |= {f"{page.name}, {number}": block for number, block in enumerate(blocks)}
    return texts


@pytest.mark.parametrize("text", [pytest.param(text, id=where) for where, text in _python().items()])
def test_what_a_user_copies_needs_public_names_alone(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("raydali.")]
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("raydali"):
            assert node.module == "raydali" and {alias.name for alias in node.names} <= set(PUBLIC)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "raydali":
            assert node.attr in PUBLIC


@pytest.mark.parametrize(
    ("old", "remedy"),
    [
        ("raydali.data.sources.builtin.digits import digits_folder", "from raydali import digits_folder"),
        (
            "raydali.train.optim import (\n    learning_rate,\n    build_optimizer as build,\n)",
            "learning_rate, build_o",
        ),
        ("raydali.sources.formats import train_and_val", "from raydali import open_labeled as train_and_val"),
        ("raydali.data.sources.inner import of_no_use", "no public name of_no_use: `raydali new`"),
    ],
)
def test_an_old_import_in_a_copied_job_names_the_new_one(old: str, remedy: str, tmp_path: Path) -> None:
    text = (ROOT / "jobs/imagenet.py").read_text()
    (tmp_path / "my_job.py").write_text(text.replace("import raydali\n", f"from {old}\n", 1))
    env = environment(tmp_path)
    done = subprocess.run(
        [sys.executable, "my_job.py", "--help"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    *_, last = done.stderr.splitlines()
    assert done.returncode == 1 and last.startswith("ModuleNotFoundError: the module raydali.") and remedy in last


def test_other_imports_fail_as_any() -> None:
    assert importlib.util.find_spec("raydali.none") is None
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'raydali\.none'"):
        importlib.import_module("raydali.none.none")


@pytest.mark.parametrize("name", ["ray_train.py", "torchrun.py"])
def test_an_example_is_short(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    lines = [line for line in text.splitlines() if line.strip() and not re.match(r'import |from |"""', line)]
    assert len(lines) <= 35


def _torchrun(folder: Path, processes: int, here: Path) -> "subprocess.Popen[str]":
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node", str(processes), str(EXAMPLES / "torchrun.py"), str(folder)]
    return subprocess.Popen(command, cwd=here, env=environment(here), stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_torchrun_is_killed_and_goes_on_with_other_processes(folder: Path, tmp_path: Path) -> None:
    records = []
    process = _torchrun(folder, 2, tmp_path)
    try:
        assert process.stdout is not None
        records.append(json.loads(process.stdout.readline()))
        while not (tmp_path / "state.pt").exists():
            time.sleep(0.01)
    finally:
        kill([process.pid, *descendants(process.pid)])
        process.communicate()
    process = _torchrun(folder, 1, tmp_path)
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        kill([process.pid, *descendants(process.pid)] if process.poll() is None else [])
    assert process.returncode == 0
    records += map(json.loads, output.splitlines())
    assert [record["epoch"] for record in records] == [0, 1, 2]
    assert [record["world_size"] for record in records] == [2, 1, 1]
    for before, after in pairwise(records):
        assert after["samples_consumed"] - before["samples_consumed"] == after["images"]
    assert records[-1]["samples_consumed"] == STEPS * GLOBAL_BATCH


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(600)
def test_ray_train_resumes_on_another_number_of_workers(folder: Path, tmp_path: Path) -> None:
    script = (EXAMPLES / "ray_train.py").read_text()
    (tmp_path / "home").mkdir()
    one_epoch = tmp_path / "one_epoch.py"  # as if it had ended after its first epoch
    one_epoch.write_text(script.replace("for epoch in measured(loader):", "for epoch in [next(measured(loader))]:"))
    outputs = []
    for file, workers in ((one_epoch, 2), (EXAMPLES / "ray_train.py", 1)):
        command = [sys.executable, str(file), str(folder), str(workers)]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(tmp_path / "home"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=280)
        finally:
            kill([process.pid, *descendants(process.pid)] if process.poll() is None else [])
        assert process.returncode == 0, output
        outputs.append(output)
    first, second = outputs
    assert "'samples_consumed': 96" in first and "'world_size': 2" in first, first
    assert f"'samples_consumed': {STEPS * GLOBAL_BATCH}" in second and "'world_size': 1" in second, second
