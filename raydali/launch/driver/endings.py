"""Describes how workers, and runs, have ended: in one line instead of 600 characters of Ray."""

import re
import traceback
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import ray

import raydali
from raydali.errors import TrainingError, UsageError
from raydali.launch.driver.cluster import call_on_nodes
from raydali.run.events import WorkerAddress
from raydali.run.find import newest_step
from raydali.run.folder import RunFolder
from raydali.run.messages import WorkerError
from raydali.text import error_line, numbered

POLL_SECONDS = 10.0
"""Timeout of the task that reads the log of the process on its node."""
_PACKAGE = Path(raydali.__file__).parent
_CRASH = re.compile(r"\*\*\* (SIG[A-Z]+) received|Fatal Python error: (.+)")


def silence_ray() -> None:
    """Keep Ray from printing its own description of each death in the driver."""
    ray._private.worker.print_to_stdstream = lambda *_, **__: None


def describe_deaths(
    killed: Sequence[int], places: Mapping[int, WorkerAddress], error: str, hung: Collection[WorkerAddress] = ()
) -> str:
    """Describe which ranks died, where and why, as far as it is known; takes up to POLL_SECONDS per node.

    Args:
        killed: the ranks.
        places: where they ran; the others are only described by `error`.
        error: Ray's description.
        hung: the processes that were killed because they held up the run.
    """
    nodes: dict[str, list[int]] = defaultdict(list)
    for rank in killed:
        if rank in places:
            nodes[places[rank][0]].append(rank)
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    texts = []
    for node, ranks in nodes.items():
        who = numbered("rank", ranks) + (f" (process {places[ranks[0]][1]})" if len(ranks) == 1 else "")
        if all(places[rank] in hung for rank in ranks):
            why = "killed, because it held up the run"
        else:
            why = _cause(node, places[ranks[0]][1], error) if node in alive else "their node is gone"
        texts.append(f"{who} on node {node[:8]} died: {why}")
    return "; ".join(texts) or error


def _cause(node: str, pid: int, error: str) -> str:
    if "low on memory" in error:
        return "Ray killed it, because the node ran out of memory"
    if node == ray.get_runtime_context().get_node_id():
        return cause_here(pid)
    (answer,) = call_on_nodes(cause_here, [(node, (pid,))], POLL_SECONDS)
    # Ray notices the death of a node later than the death of its processes.
    return "their node does not answer" if isinstance(answer, Exception) else answer


def cause_here(pid: int) -> str:
    """Describe what ended a process of this node: what its log says, if it had time to write it."""
    context = ray.get_runtime_context()
    logs = Path(context.get_temp_dir(), context.get_session_name(), "logs")
    for log in logs.glob(f"worker-*-{pid}.err"):
        if crash := _CRASH.search(log.read_text(errors="replace")):
            return f"it crashed: {crash[1] or crash[2]}"
    text = "its log names no cause, as after SIGKILL by a person or a program"
    with suppress(OSError):
        if "\noom_kill 0\n" in Path("/proc/vmstat").read_text():
            return f"{text} (not by the kernel for lack of memory)"
    return f"{text}, or by the kernel when memory runs out"


def resume_hint(folder: RunFolder) -> str:
    """Describe what an interrupted run can be resumed from."""
    with suppress(OSError):
        if newest_step(folder) is None:
            saved = "nothing is saved: the same command starts from the beginning"
            return f"interrupted before the first checkpoint, so {saved}"
    return f"interrupted: the same command with --name {folder.name} resumes it"


def driver_error(error: Exception, folder: RunFolder) -> TrainingError:
    """Return the error of a run whose driver failed: Ray died on its node, or a poll raised an unexpected exception."""
    from ray.exceptions import RayError

    text = f"{type(error).__name__}: {error_line(error)}".rstrip(": .")
    if isinstance(error, RayError | ChildProcessError):
        what = f"Ray failed on the driver's node ({text})"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        frame = [entry for entry in frames if Path(entry.filename).is_relative_to(_PACKAGE)][-1]
        what = f"the driver failed ({text}, {Path(frame.filename).name}:{frame.lineno})"
    return TrainingError(f"{what}: the same command with --name {folder.name} resumes the run")


def final_error(errors: Sequence[WorkerError], failure: str, stop_reason: str) -> Exception:
    """Return the first error that a worker reported, since later ones often only follow from it; else what Ray knows.

    Args:
        errors: see `WorkerGroup`, as the next two.
        failure: the end of the last worker group, as Ray Train describes it.
        stop_reason: why the run must end.
    """
    if not errors:
        return TrainingError(f"{failure} ({stop_reason})")
    first = errors[0]
    if first.usage:
        return UsageError(first.error)
    reason = "" if first.final else f" ({stop_reason})"
    return TrainingError(f"{first.traceback}rank {first.rank}: {first.error}{reason}")
