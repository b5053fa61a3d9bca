"""The `raydali` command: quick to answer, and its exit codes."""

import subprocess
import sys

import pytest

from raydali import cli
from raydali.bench import loader_bench
from raydali.bench.loader_bench import LoaderBench
from raydali.bench.results import BenchFailed
from raydali.errors import UsageError

HEAVY = ("torch", "ray", "nvidia.dali", "matplotlib", "pyarrow")


@pytest.mark.parametrize(
    "command",
    [
        *("", "bench", "bench loader", "bench strategies", "bench train", "bench video", "preview", "doctor", "report"),
        *("cluster", "cluster up", "cluster down", "cluster status"),
    ],
)
def test_help_imports_nothing_heavy(command: str) -> None:
    script = (
        "import sys, raydali.cli\n"
        "try:\n    raydali.cli.main(sys.argv[1:])\n"
        f"finally:\n    print('heavy:', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split(), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: raydali" in done.stdout and "heavy: []" in done.stdout


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (BenchFailed("no rate"), 1), (UsageError("too many"), 2), (KeyboardInterrupt(), 130)]
)
def test_exit_codes(
    error: BaseException | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def main(options: LoaderBench) -> None:
        seen.append(options)
        if error:
            raise error

    monkeypatch.setattr(loader_bench, "main", main)
    args = ["bench", "loader", "--gpus", "1,2", "--batch-size", "8"]
    if error:
        with pytest.raises(SystemExit) as left:
            cli.main(args)
        assert left.value.code == code
        assert (f"error: {error}" if str(error) else "interrupted") in capsys.readouterr().err
    else:
        cli.main(args)
    assert seen == [LoaderBench(gpus="1,2", batch_size=8)]


def test_an_unknown_option_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "loader", "--batchsize", "8"])
    assert left.value.code == 2
