"""The output of a process whose reader goes away, stops reading, or was never there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.messages import mentions

ROOT = Path(__file__).parents[2]
RAYDALI = str(Path(sys.executable).with_name("raydali"))
PRINT = """
import sys
from pathlib import Path
from raydali.host.background import Background
from raydali.host.standard_streams import outlive_readers
outlive_readers(Background("output") if sys.argv[1] == "run" else None)
sys.stdin.readline()
for number in range(20_000):
    print("line", number)
print("the end", file=sys.stderr)
Path(sys.argv[2]).touch()
sys.exit(3)
"""


def start(kind: str, done: Path, stdout: int, stderr: int) -> "subprocess.Popen[bytes]":
    """Start a process that prints 200 KB once it gets a line, makes a file, and ends with 3."""
    command = [sys.executable, "-c", PRINT, kind, str(done)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)


def go(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("kind", ["run", "command"])
def test_a_process_outlives_the_reader_of_both_streams(kind: str, terminal: bool, tmp_path: Path) -> None:
    reader, writer = os.openpty() if terminal else os.pipe()
    process = start(kind, tmp_path / "done", stdout=writer, stderr=writer)
    for descriptor in (writer, reader):
        os.close(descriptor)
    go(process)
    assert process.wait(60) == 3 and (tmp_path / "done").exists()


def test_a_run_waits_for_no_reader_and_loses_nothing_that_is_read_later(tmp_path: Path) -> None:
    process = start("run", tmp_path / "done", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    go(process)
    while not (tmp_path / "done").exists():
        assert process.poll() is None
    assert process.stdout is not None
    lines = process.stdout.read().decode().splitlines()
    assert lines[:2] == ["line 0", "line 1"] and lines[-1] == "the end" and process.wait(60) == 3


def test_a_full_disk_ends_a_command_with_an_error_and_no_run(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        for kind, code in ("run", 3), ("command", 1):
            process = start(kind, tmp_path / kind, stdout=full.fileno(), stderr=subprocess.DEVNULL)
            go(process)
            assert process.wait(60) == code and (tmp_path / kind).exists() == (kind == "run")
        done = subprocess.run([RAYDALI, "completion", "bash"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and mentions(done.stderr, "error: output No space left")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [f"{RAYDALI} --help", f"{sys.executable} jobs/imagenet.py --help"])
def test_help_ends_quietly_on_any_width_without_a_reader(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "COLUMNS": "5"}
    done = subprocess.run(command.split(), cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_streams_that_are_closed_at_the_start_are_replaced(tmp_path: Path) -> None:
    (script := tmp_path / "streams.py").write_text(
        "import os, subprocess, sys\nfrom raydali.host.standard_streams import outlive_readers\noutlive_readers()\n"
        "print('a line')\nprint('a line', file=sys.stderr)\nassert sys.stdin.read() == ''\n"
        "subprocess.run(['true'], check=True)\n"
        "open(sys.argv[1], 'w').write(' '.join(os.readlink(f'/proc/self/fd/{each}') for each in range(3)))\n"
    )
    command = f"{sys.executable} {script} {tmp_path / 'names'} <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0
    assert (tmp_path / "names").read_text() == "/dev/null /dev/null /dev/null"
