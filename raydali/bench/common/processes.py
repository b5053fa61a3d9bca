"""Processes that measure together on this machine, each in a session of its own, none of them left behind.

    parent: start ---- wait for an answer of each, or the first error, or the deadline ---- kill all
    rank:       function(task, rank, port) -- answer -- wait to be killed

A rank that is done or has failed stays, so that what the others say is not that they lost it.
"""

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from types import MappingProxyType
from typing import Any


class RanksFailed(Exception):
    """The ranks gave no answer; the message says which, and ends with the reason, in most cases a traceback."""


CONTEXT = get_context("spawn")


def run_ranks(
    function: Callable[..., Any],
    task: Any,
    world_size: int,
    *,
    timeout: float,
    remedy: str = "lower --steps or raise --timeout",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:
    """What `function(task, rank, port)` returns on each rank, run in `world_size` fresh processes at once.

    Args:
        function: of a module's top level; `port` of localhost is free to meet at.
        task: may hold a barrier of CONTEXT.
        timeout: seconds from the start of the processes to the last answer.
        remedy: where they were not done in time.
        environment: variables that the processes have from their start on.

    Raises:
        RanksFailed: a rank raised or died, or they were not done in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    deadline = time.monotonic() + timeout
    processes: list[Any] = []
    pending: dict[Any, int] = {}
    answers: dict[int, Any] = {}
    try:
        with _environment(environment):
            for rank in range(world_size):
                receiver, sender = CONTEXT.Pipe(duplex=False)
                # No daemon, which could not have the DataLoader's worker processes.
                process = CONTEXT.Process(target=_run, args=(function, task, rank, port, sender))
                process.start()
                processes.append(process)
                sender.close()
                pending[receiver] = rank
        while pending:
            ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = ", ".join(map(str, pending.values()))
                raise RanksFailed(f"not done within {timeout:g} s (rank {missing}): {remedy}")
            for receiver in [receiver for receiver in pending if receiver in ready]:
                rank = pending.pop(receiver)
                answers[rank] = _answer(receiver, rank, processes[rank])
        return [answers[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            _kill(process)


def meet(rank: int, world_size: int, port: int) -> None:
    """Make these processes torch's default group, gloo's; one alone needs none."""
    import torch.distributed as dist

    if world_size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it asks what address the host's name has
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _answer(receiver: Any, rank: int, process: Any) -> Any:
    try:
        answer, error = receiver.recv()
    except EOFError:
        process.join(1)
        answer, error = None, f"the process ended with exit code {process.exitcode} and said nothing"
    if error is not None:
        raise RanksFailed(f"rank {rank}: {error}")
    return answer


def _kill(process: Any) -> None:
    """The rank and all that it started in its session: the DataLoader's workers outlive their parent by seconds."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # ended, or not far enough to have a session
        process.kill()
    process.join()


def _run(function: Callable[..., Any], task: Any, rank: int, port: int, sender: Any) -> None:
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        sender.send((function(task, rank, port), None))
    except Exception:
        sender.send((None, traceback.format_exc()))
    signal.pause()


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
