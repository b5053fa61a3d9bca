"""Processes that measure together on this machine, each in its own session, and end with the measurement.

    parent: start ---- wait for all answers, the first error or the deadline ---- kill all
    rank:       function(task, rank, port) -- answer -- wait to be killed

A rank that has finished or failed stays alive, so that the other ranks do not report a lost connection instead.
"""

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process, resource_tracker, set_start_method
from typing import Any


class MeasurementError(Exception):
    """A failed measurement. The message names the rank and ends with the reason, in most cases a traceback."""


CONTEXT = get_context("spawn")


def run_ranks(
    function: Callable[..., Any],
    task: Any,
    world_size: int,
    *,
    timeout: float,
    remedy: str = "lower --steps or raise --timeout",
) -> list[Any]:
    """Run `function(task, rank, port)` in `world_size` new processes at once, and return their results.

    Args:
        function: defined at the top level of a module; `port` is a free port of localhost.
        task: may contain a barrier of CONTEXT.
        world_size: the number of processes.
        timeout: seconds from the start of the processes to the last answer.
        remedy: the remedy in the message after a timeout.

    Raises:
        MeasurementError: a rank raised or died, or the timeout expired.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    deadline = time.monotonic() + timeout
    processes: list[Any] = []
    pending: dict[Any, int] = {}
    answers: dict[int, Any] = {}
    try:
        for rank in range(world_size):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            # Not a daemon: a daemon may not start the DataLoader's worker processes.
            process = CONTEXT.Process(target=_run, name=f"rank {rank}", args=(function, task, rank, port, sender))
            with interrupted_later():
                process.start()
                processes.append(process)
            sender.close()
            pending[receiver] = rank
        while pending:
            ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = ", ".join(map(str, pending.values()))
                raise MeasurementError(f"not done within {timeout:g} s (rank {missing}): {remedy}")
            for receiver in [receiver for receiver in pending if receiver in ready]:
                rank = pending.pop(receiver)
                answers[rank] = _answer(receiver, rank, processes[rank])
        return [answers[rank] for rank in range(world_size)]
    finally:
        # Rank 0 ends last: its process has the store of the group, and NCCL's watchdogs of other ranks print traces
        # when they lose it.
        for process in reversed(processes):
            _kill(process)


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Defer an interruption: a process that is interrupted in its start prints a traceback."""
    resource_tracker.getfd()  # starts the tracker if there is none, which would admit the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def join_ranks(rank: int, world_size: int, port: int) -> None:
    """Initialize torch's default process group with gloo, unless this process is the only one."""
    import torch.distributed as dist

    if world_size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo resolves the host's name
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


def _answer(receiver: Any, rank: int, process: Any) -> Any:
    try:
        answer, error = receiver.recv()
    except EOFError:
        process.join(1)
        answer, error = None, f"the process ended with exit code {process.exitcode} and no answer"
    if error is not None:
        raise MeasurementError(f"rank {rank}: {error}")
    return answer


def _kill(process: Any) -> None:
    """Kill the rank and its session: the DataLoader's workers would outlive it by seconds."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended, or has no session yet
        process.kill()
    process.join()


def _run(function: Callable[..., Any], task: Any, rank: int, port: int, sender: Any) -> None:
    os.setsid()
    set_start_method("fork", force=True)  # as in a program of its own; then the kill leaves no semaphores, as tqdm's
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
