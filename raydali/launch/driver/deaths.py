"""Describes workers whose processes died in one line: rank, node and signal, instead of 600 characters of Ray."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from raydali.launch.driver.on_nodes import call_on_nodes
from raydali.run.events import WorkerAddress
from raydali.text import numbered

POLL_SECONDS = 10.0
"""Timeout of the task that reads the log of the process on its node."""
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
    # Ray notices the death of a node later than that of its processes.
    return answer.result or "their node does not answer"


def cause_here(pid: int) -> str:
    """Describe what ended a process of this node: what its log says, if it had time to write it."""
    node: Any = ray._private.worker.global_worker.node
    logs = Path(node.get_logs_dir_path())
    for log in logs.glob(f"worker-*-{pid}.err"):
        if found := _CRASH.search(log.read_text(errors="replace")):
            return f"it crashed: {found[1] or found[2]}"
    text = "its log names no cause, as after SIGKILL by a person or a program"
    with suppress(OSError):
        if "\noom_kill 0\n" in Path("/proc/vmstat").read_text():
            return f"{text} (not by the kernel for lack of memory)"
    return f"{text}, or by the kernel when memory runs out"
