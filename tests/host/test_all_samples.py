"""Samples in many processes: in order, each once, and an end that is told."""

import errno
import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from raydali.errors import DataError, UsageError
from raydali.host.all_samples import SAMPLES_AT_ONCE, in_processes, process_count
from raydali.text import plural
from tests.support.messages import mentioning


def odd(ids: range) -> list[int]:
    return [id for id in ids if id % 2]


def killed(_: range) -> list[int]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def crashing(ids: range) -> list[int]:
    """Its decoder cannot survive 7 and 40."""
    if {7, 40} & {*ids}:
        os.kill(os.getpid(), signal.SIGSEGV)
    return [*ids]


def dead(id: int, reason: str) -> list[int]:
    assert "SIGSEGV" in reason
    return [-id]


def no_storage(_: range) -> None:
    raise OSError(errno.EIO, "Input/output error", "/data/1.jpg")


@pytest.mark.parametrize("samples", [1, SAMPLES_AT_ONCE, 5 * SAMPLES_AT_ONCE + 1])
def test_in_order_and_each_once(samples: int, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[int] = []

    def take(more: list[int]) -> int:
        found.extend(more)
        return len(found)

    in_processes(odd, samples, 2, "numbers", take, dead)
    assert found == [*range(1, samples, 2)]
    assert capsys.readouterr().err == f"numbers: read {samples} of {plural(samples, 'sample')}, {len(found)} broken\n"


@pytest.mark.slow
def test_a_sample_that_ends_its_process_is_named() -> None:
    found: list[int] = []

    def take(more: list[int]) -> int:
        found.extend(more)
        return 0

    in_processes(crashing, 70, 2, "numbers", take, dead)
    assert found == [-id if id in (7, 40) else id for id in range(70)]


def test_a_killed_process_and_a_failing_storage_are_errors() -> None:
    for examine, message in (
        (killed, "killed.* --workers"),
        (no_storage, ".* Input/output error: '/data/1.jpg'"),
    ):
        with pytest.raises(DataError, match=message):
            in_processes(examine, 100, 2, "numbers", lambda _: 0, lambda *_: None)


def anonymous_bytes(array: NDArray[np.int64], _: range) -> int:
    """What a process has of its own, once it has looked at all of an array."""
    assert array.sum() == len(array)
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_an_index_is_in_memory_once() -> None:
    array = np.ones(1 << 25, np.int64)  # 256 MiB, of which a process would have a copy, and its pickle meanwhile
    found: list[int] = []

    def take(more: int) -> int:
        found.append(more)
        return 0

    in_processes(partial(anonymous_bytes, array), 2 * SAMPLES_AT_ONCE, 2, "numbers", take, lambda id, _: id)
    assert len(found) == 2 and max(found) < 150e6


def test_parts_are_made_as_they_are_needed() -> None:
    class Enough(Exception):  # noqa: N818 (no error: the test wants it)
        pass

    def take(_: list[int]) -> int:
        raise Enough

    with pytest.raises(Enough):  # a list of all parts would take a terabyte
        in_processes(odd, 10**15, 2, "numbers", take, dead)


def test_process_count() -> None:
    assert process_count(None) == len(os.sched_getaffinity(0)) and process_count(3) == 3
    with pytest.raises(UsageError, match=mentioning("--workers 1 0")):
        process_count(0)
