"""`raydali doctor`: check that this host, or every node of a cluster, is ready for training, and suggest remedies.

    raydali doctor
    raydali doctor --cluster --storage s3://my-bucket/runs

A row of the table is a check with the nodes that have the same result. Exit code 1: a check fails. One actor inspects
each node of the cluster at RAY_ADDRESS; it reserves no CPU.
"""

import logging
import os
import shlex
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydali.errors import UsageError
from raydali.host.checks import Node, Row, rows
from raydali.host.facts import Host, this_host
from raydali.output import JsonFile, require_writable, write_json
from raydali.text import error_line, summarize

if TYPE_CHECKING:
    from raydali.run.folder import RunFolder  # imports pyarrow: half a second

NAMED = 3
"""Maximum number of nodes that a row names."""
WIDTH = 140
"""Width of the table when the output is not a terminal."""
JOB_POLL_SECONDS = 0.5
ANSWER_SECONDS = 60
"""Time limit for all nodes together; each starts a process, and may have to download raydali first."""
CLOCK_CALLS = 5
PACKAGE: dict[str, Any] = {"py_modules": [str(Path(__file__).parents[1])], "excludes": ["**/__pycache__"]}
"""Runtime environment that ships raydali to the nodes."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check driver, decoders, memory, limits and versions of this host or of a cluster's nodes."""

    cluster: bool = False
    """Check every node of the cluster at RAY_ADDRESS instead of this host."""
    storage: str | None = None
    """Also check that this folder or URI is writable, and with --cluster that all nodes see the same files."""
    json: JsonFile = None


def main(options: Doctor) -> None:
    """Run the checks, show the table, and exit with 1 if a check fails.

    Raises:
        UsageError: no cluster is named, or the cluster does not answer.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if options.cluster and not address:
        raise UsageError("--cluster needs RAY_ADDRESS, such as http://head:8265: set it, or leave --cluster out")
    require_writable("--json", options.json)
    if options.cluster and address.startswith("http"):
        sys.exit(_as_a_job(options, address))
    nodes = _nodes(options)
    checks = rows(nodes)
    _show(checks, len(nodes))
    if options.json:
        write_json({"rows": [asdict(row) for row in checks], "nodes": [asdict(node) for node in nodes]}, options.json)
    if any(row.status == "fail" for row in checks):
        sys.exit(1)


def _nodes(options: Doctor) -> list[Node]:
    if options.cluster:
        return nodes_of_cluster(options.storage)
    host, storage = this_host(), None
    if options.storage is not None:
        marker = Marker(options.storage, uuid.uuid4().hex)
        storage = marker.write_error()
        marker.remove()
    return [Node(name=host.name, host=host, storage=storage)]


def _show(checks: list[Row], nodes: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, emoji=False, width=WIDTH)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("check", *(["nodes"] if nodes > 1 else []), "", "found", "remedy"):
        table.add_column(heading, overflow="fold")
    style = {"ok": "green", "fail": "red", "none": "dim"}
    for row in checks:
        where = [_named(row.nodes, nodes)] if nodes > 1 else []
        status = f"[{style[row.status]}]{'-' if row.status == 'none' else row.status}[/]"
        table.add_row(row.check, *where, status, *(text.replace("[", r"\[") for text in (row.found, row.remedy)))
    console.print(table)


def _named(names: tuple[str, ...], nodes: int) -> str:
    return f"all {nodes}" if len(names) == nodes else summarize(names, NAMED)


def _as_a_job(options: Doctor, address: str) -> int:
    """Run the same command inside the cluster, as `ray job submit` does; return its exit code.

    Raises:
        UsageError: no dashboard answers at the address.
    """
    from ray.job_submission import JobSubmissionClient

    from raydali.launch.driver.ray_cluster import answering_ray

    arguments = ["python", "-m", "raydali.cli", "doctor", "--cluster", *(["--json", "-"] if options.json else [])]
    if options.storage is not None:
        arguments += ["--storage", options.storage]
    logging.getLogger("ray").setLevel(logging.ERROR)
    with answering_ray():
        client = JobSubmissionClient(address)
        job = client.submit_job(entrypoint=shlex.join(arguments), runtime_env=PACKAGE)
    try:
        while not client.get_job_status(job).is_terminal():
            time.sleep(JOB_POLL_SECONDS)
    except KeyboardInterrupt:
        client.stop_job(job)
        raise
    log = client.get_job_logs(job)
    output = log.partition(f"Running entrypoint for job {job}: ")[2].partition("\n")[2] or log
    if options.json:
        output, brace, rest = ("\n" + output).rpartition("\n{\n")  # output and then JSON, or only an error
        if brace:
            Path(options.json).expanduser().write_text("{\n" + rest)
        output = output[1:] + "\n" if brace else rest[1:]
    print(output, end="")
    code = client.get_job_info(job).driver_exit_code
    return 1 if code is None else code


@dataclass(frozen=True)
class Marker:
    """A small temporary file in the storage.

    Args:
        storage: a folder or URI, like --storage of a job.
        key: a string that is unique to this run of the doctor.
    """

    storage: str
    key: str

    def write_error(self) -> str:
        """Write the marker; return why this failed, or an empty string."""
        return self._attempt("driver", write=True)

    def read_error(self) -> str:
        """Return why this process cannot read the marker or write its own marker; empty if it can."""
        return self._attempt("driver", write=False) or self._attempt(f"{os.uname().nodename}-{os.getpid()}", write=True)

    def remove(self) -> None:
        """Delete the markers of all nodes."""
        with suppress(OSError, UsageError):
            folder = self._folder()
            folder.filesystem.delete_dir(folder.path())

    def _folder(self) -> "RunFolder":
        from raydali.run.folder import RunFolder

        return RunFolder(self.storage, f"doctor-{self.key}")

    def _attempt(self, name: str, *, write: bool) -> str:
        try:
            folder = self._folder()
            if write:
                folder.filesystem.create_dir(folder.path(), recursive=True)
                folder.write(name, self.key.encode())
            elif not folder.exists(name):
                return f"{self.storage}: the driver's file is not visible here"
            return "" if folder.read(name) == self.key.encode() else f"{self.storage}: reads differ from writes"
        except (OSError, UsageError) as error:
            return f"{self.storage}: {' '.join(str(error).split())[:200]}"


class Probe:
    """Actor that inspects its node."""

    def host(self) -> Host:
        """Return the facts about the node."""
        return this_host()

    def clock(self) -> float:
        """Return the node's time, in seconds since 1970."""
        return time.time()

    def storage(self, marker: Marker) -> str:
        """Return the reason why the node cannot use the storage; empty if it can."""
        return marker.read_error()


def nodes_of_cluster(storage: str | None) -> list[Node]:
    """Inspect every node that is alive.

    Raises:
        UsageError: no Ray answers at RAY_ADDRESS.
    """
    import ray

    from raydali.launch.driver.ray_cluster import answering_ray

    # Nodes may lack raydali. A job's package contains it; otherwise this folder is sent.
    send = None if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") else PACKAGE
    with answering_ray():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env=send)
    try:
        return _inspect([node for node in ray.nodes() if node["Alive"]], storage)
    finally:
        ray.shutdown()


def _inspect(alive: list[dict[str, Any]], storage: str | None) -> list[Node]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    marker = Marker(storage, uuid.uuid4().hex) if storage is not None else None
    wrong = marker.write_error() if marker is not None else ""
    probes, answers = {}, {}
    for node in alive:
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actor: Any = ray.remote(Probe)
        probe = actor.options(num_cpus=0, scheduling_strategy=here).remote()
        probes[node["NodeID"]] = probe
        answers[node["NodeID"]] = probe.host.remote()
    deadline = time.monotonic() + ANSWER_SECONDS
    hosts = Counter(node["NodeManagerHostname"] for node in alive)
    nodes = []
    for node in alive:
        key, name = node["NodeID"], node["NodeManagerHostname"]
        if hosts[name] > 1:  # several nodes on one host
            name = f"{name} ({key[:4]}...{key[-4:]})"
        seconds = max(1.0, deadline - time.monotonic())
        try:
            host = ray.get(answers[key], timeout=seconds)
            seen: str | None = None
            if marker is not None:
                seen = wrong or ray.get(probes[key].storage.remote(marker), timeout=seconds)
            nodes.append(Node(name=name, host=host, skew=_skew(probes[key]), storage=seen))
        except ray.exceptions.GetTimeoutError:
            nodes.append(Node(name=name, silence=f"no answer within {ANSWER_SECONDS} s"))
        except ray.exceptions.RayError as error:
            nodes.append(Node(name=name, silence=error_line(error)))
    if marker is not None:
        marker.remove()
    return nodes


def _skew(probe: Any) -> tuple[float, float]:  # noqa: ANN401 (an actor of Ray)
    """Return by how many seconds the node's clock is ahead of this one's, and the maximum error of this value."""
    import ray

    best = (0.0, float("inf"))
    for _ in range(CLOCK_CALLS):
        began = time.time()
        there = ray.get(probe.clock.remote(), timeout=10)
        ended = time.time()
        if (ended - began) / 2 < best[1]:
            best = there - (began + ended) / 2, (ended - began) / 2
    return best
