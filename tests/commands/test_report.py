"""`raydali report`: where pages go, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pytest

from raydali import cli
from raydali.run.folder import FORM, RunFolder
from tests.support.messages import mentions
from tests.support.report_runs import event, record, start, write


def run(*args: str) -> int:
    try:
        cli.main(["report", *args])
    except SystemExit as left:
        assert isinstance(left.code, int)
        return left.code
    return 0


def made(storage: Path, name: str, epochs: int = 2) -> RunFolder:
    folder = RunFolder(str(storage), name)
    folder.create()
    write(folder, [record(epoch) for epoch in range(epochs)], [start(1), event("finish", 9)], epochs=epochs)
    return folder


def test_a_page_goes_to_the_folder_of_its_run(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, [record(0)], [start(1)])
    folder.write("report.html", b"old")
    assert run(str(folder)) == run(f"{folder}/") == 0
    assert capsys.readouterr().out == 2 * f"{folder}/report.html\n"
    assert b"1 of 10 epochs" in folder.read("report.html")


def test_a_relative_folder_and_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path, "pets")
    monkeypatch.chdir(tmp_path / "pets")
    assert run(".", "-o", "../page.html") == 0
    assert "page.html: " in capsys.readouterr().out
    assert b"Finished: 2 of 2 epochs" in (tmp_path / "page.html").read_bytes() and not folder.exists("report.html")


def test_several_runs_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [made(tmp_path / "runs", name, epochs) for name, epochs in (("a", 1), ("b", 2))]
    folders[1].write_json("model.json", {"best": {"epoch": 0, "metric": "top1", "score": 0.625}})
    runs = [*map(str, folders)]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run(*runs) == 0
    said = capsys.readouterr().out
    assert mentions(said, "b top1 0.5 1 0.625 0 100") and f"{tmp_path}/runs/comparison.html: " in said
    assert run(*runs, "--output", "both.html") == 0
    for name in ("runs/comparison.html", "here/both.html"):
        assert b"2 runs beside one another" in (tmp_path / name).read_bytes()
    assert not (tmp_path / "runs/a/report.html").exists() and len([*Path.cwd().iterdir()]) == 1


SCORES = 0.5, 0.6, 0.85


def folds(storage: Path, **of_last: Any) -> list[str]:
    """Runs of the folds 1/5 to 3/5, of which the last has other settings."""
    made_ = [made(storage, f"run-{number}", 2) for number in (1, 2, 3)]
    for number, (folder, best) in enumerate(zip(made_, SCORES, strict=True), 1):
        settings = {
            "fold": f"{number}/5",
            "name": folder.name,
            "fingerprint": f"{number}",
            "lr": 0.1,
            "workers": "2",
            "form": FORM,
        }
        folder.write_json("config.json", settings | (of_last if number == 3 else {}))
        folder.write_json("model.json", {"best": {"epoch": 0, "metric": "top1", "score": best}})
    return [*map(str, made_)]


def test_folds_of_one_configuration_have_a_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = folds(tmp_path, workers="1")
    assert run(*runs) == 0
    told = "top1 over 3 of 5 folds: last 0.5 (standard deviation 0), best 0.65 (standard deviation 0.1803)"
    assert told in capsys.readouterr().out and told in (tmp_path / "comparison.html").read_text()
    assert run(*runs[:2]) == 0
    assert (
        "2 of 5 folds: last 0.5 (standard deviation 0), best 0.55 (standard deviation 0.07071)"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("other", [{"lr": 0.2}, {"fold": "3/4"}, {"fold": "2/5"}, {"fold": None}, {"data": "/b"}])
def test_other_runs_have_no_mean(other: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*folds(tmp_path, **other)) == 0
    assert "standard deviation" not in capsys.readouterr().out


def test_folds_without_a_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = folds(tmp_path)
    Path(runs[1], "model.json").unlink()
    assert run(*runs) == 0
    assert "standard deviation" not in capsys.readouterr().out


def test_runs_of_several_storages_need_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(made(tmp_path / storage, "a")) for storage in ("one", "two")]
    assert run(*runs) == 2
    assert mentions(capsys.readouterr().err, "--output")
    assert run(*runs, "-o", f"{tmp_path}/both.html") == 0


def test_the_best_epoch_is_printed(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, [record(0), record(1)], [start(1)])
    folder.write_json("model.json", {"best": {"epoch": 0, "metric": "top1", "score": 0.625}})
    assert run(str(folder)) == 0
    assert mentions(capsys.readouterr().out, "top1 0.5 1 best 0.625 0 best/")


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (("nowhere",), "nowhere config.json"),
        (("two words",), "two words"),
        (("pets", "-o", "no/such/page.html"), "--output no/such/page.html"),
        (("torn",), "torn/epochs.jsonl line 1"),
        (("config",), "config/config.json"),
        (("ftp://host/runs/pets",), "ftp://host/runs/pets endpoint Unrecognized"),
        (("pets", "nowhere"), "nowhere"),
    ],
)
def test_bad_usage_is_one_line(
    args: tuple[str, ...],
    values: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made(tmp_path, "pets")
    made(tmp_path, "torn").write("epochs.jsonl", b"{\n{}\n")
    made(tmp_path, "config").write("config.json", b"{")
    monkeypatch.chdir(tmp_path)
    assert run(*args) == 2
    error = capsys.readouterr().err
    assert mentions(error, values) and error.startswith("error: ") and error.count("\n") == 1
    assert "--storage" not in error and "--name" not in error  # which are no options of this command


def test_no_run_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "report needs a run" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path, "pets")

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(RunFolder, "write", full)
    assert run(str(folder)) == 2
    assert mentions(capsys.readouterr().err, "--output")
