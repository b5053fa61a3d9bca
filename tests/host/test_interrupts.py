"""SIGINT, SIGTERM and SIGHUP at any moment: nothing half-written, and a run is asked to end."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from raydali.host import interrupts
from raydali.host.interrupts import SAME_SECONDS, Interrupt, deferred_signals
from raydali.run.folder import RunFolder
from tests.support.object_stores import PutObjects

ROOT = Path(__file__).parents[2]

APPEND_FOR_EVER = """
import itertools, sys
from raydali.host.interrupts import raise_on_signals
from raydali.run.folder import RunFolder
folder = RunFolder(sys.argv[1], "run")
raise_on_signals()
try:
    print("ready", flush=True)
    for number in itertools.count(len(folder.rows("events.jsonl"))):
        folder.append("events.jsonl", {"number": number})
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_append_to_an_object_store_loses_nothing(s3: PutObjects) -> None:
    bucket = uuid4().hex
    s3(bucket, {})
    folder = RunFolder(f"s3://{bucket}/runs", "run")
    folder.create()
    draw, rows = random.Random(0), 0
    for _ in range(60):
        with subprocess.Popen(
            [sys.executable, "-c", APPEND_FOR_EVER, folder.uri_of_storage], cwd=ROOT, stdout=subprocess.PIPE
        ) as process:
            try:
                assert process.stdout is not None and process.stdout.readline() == b"ready\n"
                while (before := len(folder.rows("events.jsonl"))) <= rows:
                    assert process.poll() is None
                time.sleep(draw.uniform(0, 0.05))
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 130
            finally:
                process.kill()
        now = [row["number"] for row in folder.rows("events.jsonl")]
        assert now == list(range(len(now))) and len(now) >= before
        rows = len(now)


def test_a_signal_is_a_request_only_while_it_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt = Interrupt()
    monkeypatch.setattr(interrupts, "SAME_SECONDS", 1000.0)
    with interrupt.on_signals():
        assert not interrupt.requested()
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested() and not interrupt.again() and interrupt.why == "interrupted"
        signal.raise_signal(signal.SIGINT)  # to the process, then to its group
        assert not interrupt.again()
        monkeypatch.setattr(interrupts, "SAME_SECONDS", 0.0)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.again()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_code_asks_from_another_thread_and_says_why() -> None:
    interrupt = Interrupt()
    thread = threading.Thread(target=interrupt.request, args=("node drained",))
    thread.start()
    thread.join()
    assert interrupt.requested() and not interrupt.again() and interrupt.why == "node drained"
    interrupt.request()
    assert interrupt.again() and interrupt.why == "node drained"


def test_the_third_signal_ends_the_process() -> None:
    waits = (
        "import time; from raydali.host.interrupts import *; raise_on_signals()\n"
        "with Interrupt().on_signals():\n    print('ready', flush=True)\n    while True: time.sleep(9)"
    )
    with subprocess.Popen([sys.executable, "-c", waits], cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            sent = 0  # on a busy machine two may come as one
            while process.poll() is None:
                process.send_signal(signal.SIGTERM)
                sent += 1
                time.sleep(3 * SAME_SECONDS)
            assert process.returncode == 130 and sent >= 3
        finally:
            process.kill()


def test_what_is_deferred_is_done_first() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        signal.raise_signal(signal.SIGINT)
        done.append("the write")
    assert done == ["the write"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


HANGUP = """
import sys
from raydali.host.interrupts import raise_on_signals
raise_on_signals()
try:
    print("ready", flush=True)
    sys.stdin.readline()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("nohup", [False, True])
def test_a_hangup_interrupts_unless_it_was_ignored_at_the_start(nohup: bool) -> None:
    command = [*(["nohup"] if nohup else []), sys.executable, "-c", HANGUP]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            os.killpg(process.pid, signal.SIGHUP)
            if not nohup:
                assert process.stdout.readline() == "interrupted\n"
            assert process.communicate("\n", timeout=60)[0] == "" and process.returncode == 0
        finally:
            process.kill()


def test_the_end_of_a_terminal_is_the_reason_of_an_interrupt() -> None:
    interrupt, before = Interrupt(), signal.signal(signal.SIGHUP, lambda *_: None)
    with interrupt.on_signals():
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert interrupt.requested() and "terminal" in interrupt.why
