"""What the live display costs a driver: computing, on a real pseudo-terminal at its own rate."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

MOST = 0.05
"""Of one core; 0.3% on a machine of 2026, and ten times that would be a mistake on any."""

DRIVER = """
import sys, time
from raydali.measure.records import Figures
from raydali.report.console import Console
from raydali.run.messages import EpochEnded, Progress, RankFigures

ranks, seconds = int(sys.argv[1]), float(sys.argv[2])
console = Console()
record = {"epoch": 0, "images": 1281167, "loss": 2.7, "validation": None, "verdict": "step-bound: at the ceiling"}
console.show(EpochEnded(record))
begun = None
for tick in range(int(2 * seconds) + 2):  # progress comes twice a second, a rank's figures every 5 s
    facts = {"step": 10 * tick + 1, "steps": 450360, "epoch": 0, "epochs": 90}
    console.show(Progress(**facts, samples_consumed=2560 * tick + 256))
    for rank in range(tick % 10, ranks, 10) if begun else range(ranks):
        wait = 0.5 if rank % 50 == 7 else 0.01
        console.show(RankFigures(rank, Figures(images=0, loader_wait_fraction=wait, of_ceiling=0.95)))
    if tick == 1:  # the first frame is slow, once
        begun = time.process_time(), time.perf_counter()
    time.sleep(0.5)
used, passed = time.process_time() - begun[0], time.perf_counter() - begun[1]
console.close()
open(sys.argv[3], "w").write(f"{used / passed} {passed}")
"""


def shown(ranks: int, seconds: float, result: str, *, width: int = 100) -> bytes:
    """What a driver that runs for so long writes to a terminal of that width.

    Its share of a core goes to `result`, and the seconds that it ran.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    chunks: list[bytes] = []

    def drain() -> None:
        try:
            while chunk := os.read(master, 1 << 16):
                chunks.append(chunk)
        except OSError:  # the other end is closed
            pass

    thread = threading.Thread(target=drain)
    thread.start()
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    env["TERM"] = "xterm-256color"
    try:
        command = [sys.executable, "-c", DRIVER, str(ranks), str(seconds), result]
        subprocess.run(command, stdin=slave, stdout=slave, stderr=slave, env=env, timeout=240, check=True)
    finally:
        os.close(slave)
        thread.join()
        os.close(master)
    return b"".join(chunks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 8, 256])
def test_the_display_takes_a_small_part_of_a_core(ranks: int, tmp_path: Path) -> None:
    result = tmp_path / "share"
    written = shown(ranks, 4.0, str(result))
    share, passed = map(float, result.read_text().split())
    frames = written.count(b"/450360")
    assert 3 <= frames <= 3 * passed, "it was drawn at its rate"
    print(f"{ranks} ranks: {share:.2%} of a core")
    assert share < MOST
