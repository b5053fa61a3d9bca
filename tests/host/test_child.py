"""A supervised child process: results, errors, deaths, and an end with its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from raydali.errors import UsageError
from raydali.host.child import Child, ChildDiedError, Children, take_output
from tests.support.messages import mentioning


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child("decoder", seconds=60)
    yield made
    made.close()


def own_process() -> int:
    return os.getpid()


def half(number: int) -> int:
    if number % 2:
        raise UsageError(f"{number} is odd")
    return number // 2


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGSEGV if number else signal.SIGKILL)
    return number


def printed() -> str:
    os.write(2, b"a decoder's warning")
    return take_output()


def test_results_and_errors_come_as_they_are(child: Child) -> None:
    assert child.call(half, 8) == 4
    with pytest.raises(UsageError, match="7 is odd"):
        child.call(half, 7)
    assert child.call(own_process) == child.call(own_process) != os.getpid()
    assert child.call(printed) == "a decoder's warning" and child.call(printed) == "a decoder's warning"


def test_a_death_is_told_and_the_next_call_works(child: Child) -> None:
    with pytest.raises(ChildDiedError, match=mentioning("decoder SIGSEGV")) as died:
        child.call(die, 1)
    assert died.value.signal == signal.SIGSEGV
    assert child.call(half, 4) == 2


def test_a_call_that_does_not_end_is_ended() -> None:
    child = Child("object reader", seconds=0.5)
    with pytest.raises(ChildDiedError, match=mentioning("object reader 0.5")):
        child.call(time.sleep, 600)
    child.close()


def test_many_children_answer_in_order() -> None:
    children = Children(2, "decoder")
    found = children.map(half, [0, 1, 2, 4])
    assert found[0] == 0 and isinstance(found[1], UsageError) and found[2:] == [1, 2]
    assert isinstance(children.map(die, [1])[0], ChildDiedError)
    children.close()


def test_it_ends_with_its_parent_in_the_midst_of_a_call() -> None:
    code = (
        "import time, threading; from raydali.host.child import Child; from tests.host.test_child import own_process\n"
        "child = Child('decoder'); print(child.call(own_process), flush=True); child.call(time.sleep, 600)"
    )
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    ) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        process.wait(timeout=60)


INTERRUPTED = """
import os, sys, threading, time
from functools import partial
from pathlib import Path
from raydali.host.child import Children
from raydali.host.all_samples import in_processes
from tests.host.test_child import begin_and_sleep, begin_part
if sys.argv[2] == "pool":
    work = partial(begin_and_sleep, sys.argv[1])
    in_processes(work, 2, 2, "numbers", lambda _: 0, lambda *_: None, at_once=1)
else:
    threading.Thread(target=Children(1, "decoder").map, args=(begin_part, [(sys.argv[1], range(1))] * 2)).start()
    sys.stdin.readline()
"""


def begin_and_sleep(folder: str, ids: range) -> None:
    Path(folder, f"{ids[0]}-{os.getpid()}").touch()
    time.sleep(600)


def begin_part(part: tuple[str, range]) -> None:
    begin_and_sleep(*part)


@pytest.mark.parametrize(("way", "busy"), [("pool", 2), ("thread", 1)])
def test_an_interrupt_ends_what_runs_in_children_at_once(way: str, busy: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), way]
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    ) as parent:
        while len(begun := [*tmp_path.iterdir()]) < busy:
            assert parent.poll() is None
        children = [psutil.Process(int(file.name.partition("-")[2])) for file in begun]
        parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=60) == -signal.SIGINT
        assert len(psutil.wait_procs(children, timeout=60)[1]) == 0 and len([*tmp_path.iterdir()]) == busy


def _in_fork(answer: "object") -> None:
    from raydali.data.decode.pillow import decoded
    from tests.support.odd_pictures import SOUND

    answer.put(decoded(SOUND["animated.png"]).size)  # type: ignore[attr-defined]


def test_a_forked_process_has_children_of_its_own() -> None:
    from raydali.data.decode.pillow import decoded
    from tests.support.odd_pictures import SOUND

    assert decoded(SOUND["animated.png"]).size == (48, 32)
    context = get_context("fork")
    answer = context.Queue()
    process = context.Process(target=_in_fork, args=(answer,))
    process.start()
    assert answer.get(timeout=60) == (48, 32)
    process.join()
