"""MLflow and Weights & Biases, on doubles that record what they are told; both real ones were tried by hand."""

import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from raydali.errors import UsageError
from raydali.options.every_job import TrainingOptions
from raydali.report.tracking import IDS, parse_trackers, tracked
from raydali.run.folder import RunFolder
from tests.support.messages import mentioning, mentions
from tests.support.ranks import folder_of

SETTINGS = {"epochs": 3, "workers": None}


def row(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "step": (epoch + 1) * 10, "loss": 1.0 / (epoch + 1), "validation": {"top1": 0.5}}


NUMBERS = {"train/loss": 1.0, "run/epoch": 0.0, "validation/top1": 0.5}


class Mlflow:
    """The part of MLflow that is used: one experiment, runs by their ids."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.broken = False

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        id = f"{experiment}-{len(self.runs)}"
        self.runs[id] = {"name": run_name, "tags": tags, "params": {}, "metrics": [], "status": ["RUNNING"]}
        return SimpleNamespace(info=SimpleNamespace(run_id=id))

    def get_run(self, id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(params=self.runs[id]["params"]))

    def update_run(self, id: str, status: str) -> None:
        self.runs[id]["status"].append(status)

    set_terminated = update_run

    def log_batch(self, id: str, metrics: Any = (), params: Any = ()) -> None:
        if self.broken:
            raise ConnectionError("no answer\n" + 3 * "\nsee https://mlflow.org".rjust(80))
        for name, value in params:
            assert name not in self.runs[id]["params"], "MLflow lets no parameter change"
            self.runs[id]["params"][name] = value
        self.runs[id]["metrics"] += [(name, value, step) for name, value, _, step in metrics]


class Wandb:
    """The part of Weights & Biases that is used."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.ended: list[int] = []

    def init(self, **options: Any) -> Any:
        self.inits.append(options)
        return SimpleNamespace(
            id=options["id"] or "w1",
            define_metric=lambda *_, **__: None,
            log=self.logged.append,
            finish=lambda exit_code: self.ended.append(exit_code),
        )


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, origin="a double")
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Mlflow:
    double = Mlflow()
    install(monkeypatch, "mlflow", MlflowClient=lambda: double)
    install(monkeypatch, "mlflow.entities", Metric=lambda *values: values, Param=lambda *values: values)
    return double


def test_mlflow_takes_any_name(mlflow: Mlflow, tmp_path: Path) -> None:
    """It allows letters, digits, spaces and _-.:/ in names of metrics."""
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    with tracked(folder, ("mlflow",), {"data": "/a\udcff"}, pytest.fail) as record:
        record(row(0) | {"validation": {"iou of a\udcff(b)": 0.5}})
    (run,) = mlflow.runs.values()
    assert run["params"]["data"] == r"/a\xff" and ("validation/iou of a_xff_b_", 0.5, 10) in run["metrics"]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    double = Wandb()
    install(monkeypatch, "wandb", init=double.init, Settings=lambda **settings: settings)
    return double


def run(folder: RunFolder, names: str, *epochs: int, error: type[BaseException] | None = None) -> list[str]:
    """Train these epochs, and end with this error; the warnings."""
    warnings: list[str] = []
    try:
        with tracked(folder, parse_trackers(names), SETTINGS, warnings.append) as take:
            for epoch in epochs:
                take(row(epoch))
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError):
        assert error is not None
    return warnings


def test_a_resumed_run_goes_on_as_the_same_run_of_mlflow(mlflow: Mlflow, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "pets")
    assert run(folder, "mlflow", 0, error=KeyboardInterrupt) == []
    assert run(folder, "mlflow", 1, error=ValueError) == []
    assert run(folder, "mlflow", 2) == []
    ((id, kept),) = mlflow.runs.items()
    assert mlflow.experiments == {"raydali": "0"}
    assert (kept["name"], kept["tags"]) == ("pets", {"raydali.folder": str(folder)})
    assert kept["params"] == {"epochs": "3", "workers": "None"}
    assert [(value, step) for name, value, step in kept["metrics"] if name == "run/epoch"] == [
        (0.0, 10),
        (1.0, 20),
        (2.0, 30),
    ]
    assert kept["metrics"][: len(NUMBERS)] == [(name, value, 10) for name, value in NUMBERS.items()]
    assert kept["status"] == ["RUNNING", "KILLED", "RUNNING", "FAILED", "RUNNING", "FINISHED"]
    assert folder.read_json(IDS) == {"mlflow": id}


def test_a_resumed_run_goes_on_as_the_same_run_of_wandb(wandb: Wandb, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "pets")
    run(folder, "wandb", 0, error=KeyboardInterrupt)
    run(folder, "wandb", 1)
    assert [(each["id"], each["name"], each["project"]) for each in wandb.inits] == [
        (None, "pets", "raydali"),
        ("w1", "pets", "raydali"),
    ]
    assert wandb.inits[0]["config"] == SETTINGS
    assert wandb.logged[0] == NUMBERS | {"step": 10}
    assert wandb.ended == [1, 0]
    assert folder.read_json(IDS) == {"wandb": "w1"}


def test_a_failing_tracker_is_a_warning_and_stops_no_other(
    mlflow: Mlflow, wandb: Wandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, warnings = folder_of(tmp_path), list[str]()
    with tracked(folder, parse_trackers("mlflow,wandb"), SETTINGS, warnings.append) as take:
        mlflow.broken = True
        monkeypatch.setattr("raydali.report.tensorboard.TensorBoard.epoch", lambda *_: (_ for _ in ()).throw(OSError()))
        take(row(0))
    assert len(wandb.logged) == 1
    board, of_mlflow = warnings
    assert "TensorBoard" in board and "OSError" in board
    assert "mlflow" in of_mlflow and "ConnectionError: no answer" in of_mlflow


@pytest.mark.usefixtures("wandb")
def test_a_tracker_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, warnings = threading.Event(), list[str]()
    monkeypatch.setattr("raydali.report.tracking.END_SECONDS", 0.1)
    monkeypatch.setattr("raydali.report.tracking.WandbTracker.epoch", lambda *_: answers.wait(120))
    with tracked(folder_of(tmp_path), ("wandb",), SETTINGS, warnings.append) as take:
        for epoch in range(3):
            take(row(epoch))
        assert not answers.is_set(), "the driver goes on meanwhile"
    assert len(warnings) == 1 and mentions(warnings[0], "TensorBoard wandb 0.1")
    answers.set()


def test_a_tracker_that_cannot_start_ends_the_others_too(mlflow: Mlflow, wandb: Wandb, tmp_path: Path) -> None:
    mlflow.broken = True
    with pytest.raises(UsageError, match=mentioning("--track mlflow answer")) as error:
        run(folder_of(tmp_path), "wandb,mlflow")
    assert wandb.ended == [1] and "\n" not in str(error.value)


def test_tensorboard_needs_no_asking(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with tracked(folder, (), SETTINGS, pytest.fail) as take:
        assert not folder.files("tensorboard")
        take(row(0))
    assert len(folder.files("tensorboard")) == 1
    assert not folder.exists(IDS)


@pytest.mark.usefixtures("mlflow", "wandb")
def test_names_are_a_comma_list() -> None:
    assert TrainingOptions().trackers == () and TrainingOptions(track="wandb").trackers == ("wandb",)
    assert TrainingOptions(track="mlflow, wandb,mlflow").trackers == ("mlflow", "wandb")
    for track, wrong in (("tensorbard", "tensorbard"), ("mlflow,", ""), ("", "")):
        with pytest.raises(UsageError, match=mentioning(f"--track {track} mlflow wandb {wrong}")):
            TrainingOptions(track=track)


def test_what_is_not_installed_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "wandb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "wandb").mkdir()  # offline runs in the working directory look like a package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("mlflow", "wandb"):
        with pytest.raises(UsageError, match=f"--track {name} needs the package {name}: pip install {name}"):
            TrainingOptions(track=name)
