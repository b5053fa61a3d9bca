"""`raydali doctor`: check that this host, or every node of a cluster, is ready for training, and suggest remedies.

    raydali doctor
    raydali doctor --cluster --storage s3://my-bucket/runs

A row of the table is a check with the nodes that have the same result. Exit code 1: a check fails.
"""

import logging
import os
import shlex
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from raydali.errors import UsageError
from raydali.host.checks import Node, Row, rows
from raydali.output import JsonFile, require_writable, write_json
from raydali.text import summarize

NAMED = 3
"""Maximum number of nodes that a row names."""
WIDTH = 140
"""Width of the table when the output is not a terminal."""
JOB_POLL_SECONDS = 0.5


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
    found = rows(nodes)
    _show(found, len(nodes))
    if options.json:
        write_json({"rows": [asdict(row) for row in found], "nodes": [node.as_json() for node in nodes]}, options.json)
    if any(row.status == "fail" for row in found):
        sys.exit(1)


def _nodes(options: Doctor) -> list[Node]:
    if options.cluster:
        from raydali.commands.doctor.nodes import nodes_of_cluster

        return nodes_of_cluster(options.storage)
    from raydali.commands.doctor.storage import Marker
    from raydali.host.facts import this_host

    host, storage = this_host(), None
    if options.storage is not None:
        marker = Marker(options.storage, uuid.uuid4().hex)
        storage = marker.write_error()
        marker.remove()
    return [Node(name=host.name, host=host, storage=storage)]


def _show(found: list[Row], nodes: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, emoji=False, width=WIDTH)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("check", *(["nodes"] if nodes > 1 else []), "", "found", "remedy"):
        table.add_column(heading, overflow="fold")
    style = {"ok": "green", "fail": "red", "none": "dim"}
    for row in found:
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

    from raydali.commands.doctor.nodes import PACKAGE
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
        output, brace, found = ("\n" + output).rpartition("\n{\n")  # output and then JSON, or only an error
        if brace:
            Path(options.json).expanduser().write_text("{\n" + found)
        output = output[1:] + "\n" if brace else found[1:]
    print(output, end="")
    code = client.get_job_info(job).driver_exit_code
    return 1 if code is None else code
