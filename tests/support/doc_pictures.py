"""This file makes the pictures of reports in docs/ anew, from two runs of the demo: `make pictures`.

    docs/report.png   the top of the report of a run
    docs/ledger.png   the ledger of a run of which a worker was killed

Chromium draws the pages (Debian's package chromium). A ceiling is measured on an idle machine only.
"""

import sys
import tempfile
import time
from pathlib import Path

from raydali.run.folder import RunFolder
from tests.support.browser import Browser, chromium
from tests.support.cluster import ROOT, committed, descendants, environment, kill, name_of, start_job

WIDTH, HEIGHT = 1084, 1190
RUN_SECONDS = 600
STEPS_BEFORE_KILL = 200


def train(folder: RunFolder, home: Path, *options: str, kill_worker: bool = False) -> Path:
    """The report of a run of the demo, of which one worker is killed after some steps, if asked for."""
    options = ("--storage", folder.storage, "--name", folder.name, *options)
    process = start_job(*options, env=environment(home), log=home / "log")
    try:
        deadline = time.monotonic() + RUN_SECONDS
        while kill_worker and committed(folder) < STEPS_BEFORE_KILL:
            assert process.poll() is None and time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.1)
        if kill_worker:
            kill([pid for pid in descendants(process.pid) if "RayTrainWorker" in name_of(pid)][:1])
        assert process.wait(RUN_SECONDS) == 0, (home / "log").read_text()
    finally:
        kill([process.pid, *descendants(process.pid)] if process.poll() is None else [])
    return Path(folder.path("report.html"))


def main(docs: Path) -> None:
    """Write both pictures into a folder."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as work:
        home = Path(work) / "home"
        home.mkdir()
        pages = [train(RunFolder(work, "digits"), home)]
        options = ("--epochs", "60", "--checkpoint-every", "20", "--price", "3.6")
        pages.append(train(RunFolder(work, "killed"), home, *options, kill_worker=True))
        with Browser(Path(work) / "profile") as browser:
            browser.open(pages[0], width=WIDTH, height=HEIGHT)
            (docs / "report.png").write_bytes(browser.picture())
            browser.open(pages[1], width=WIDTH, height=HEIGHT)
            (docs / "ledger.png").write_bytes(browser.picture(of=".ledger"))


if __name__ == "__main__":
    if chromium() is None:
        sys.exit("error: pictures need Chromium: apt-get install chromium")
    main(ROOT / "docs")
