"""Chaos: inject faults into a training run on several nodes of this machine.

    make chaos                                      all faults, as root; without root some are skipped
    python -m tests.support.chaos --faults worker,disk --nodes 2 --json chaos.json
    python -m tests.support.chaos --kills 20        so many faults `worker`
    python -m tests.support.chaos --gpu --nodes 2   on GPUs, which the nodes share

    undisturbed   a run on the built-in digits, for its losses
    disturbed     the same run; each fault is injected when training has progressed after the previous fault
    accounting    compares the trace of samples with the stream, compares the losses, and lists leaked resources

The cluster is a real one with its own processes, ports and folder; no other Ray cluster is affected.
"""

import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from raydali.errors import CommandError, UsageError
from raydali.output import JsonFile, machine, mark_warnings, parse_options, require_writable, show, write_json
from raydali.text import number, plural

NAMES = ("worker", "node", "link", "freeze", "disk", "corrupt", "driver")
MOST_MISSING = 0.01
"""Tolerated share of the time that workers were held which the parts of the ledger do not add up to."""
DEFAULT_EPOCHS, EPOCHS_OF_KILL, EPOCHS_OF_KILL_ON_GPU = 60, 12, 40


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """Inject faults into a run on a cluster of its own, and count the samples that it loses or repeats."""

    faults: str = ",".join(NAMES)
    """Faults to inject, in this order."""
    kills: int = 0
    """Inject the fault `worker` so many times instead."""
    nodes: int = 3
    """Nodes of the cluster, all on this machine."""
    workers_per_node: int = 1
    """Workers of the run on each node."""
    gpu: bool = False
    """Train on the GPUs of this machine, which the nodes share; otherwise on CPUs."""
    epochs: int | None = None
    """Epochs of the run: enough for it to last until the last fault. Default: 60, or 12 (with --gpu 40) for each of
    --kills if that is more."""
    json: JsonFile = None


def main(options: Chaos) -> dict[str, Any]:
    """Run the experiment, write the file and show the table.

    Returns:
        The content of --json: {"command", "machine", "settings", "left_out": the reason for each fault that was not
        injected, "over": why the last faults are missing, if the run was over before, "rows", "same_stream",
        "ledger": see `ledger_of`, "losses": {"undisturbed" and "disturbed": one for each epoch, "largest_difference",
        "agree"}, "left": {"processes", "ports", "shared_memory"}, "seconds"}. A row is {"fault", "noticed_seconds",
        "noticed_by", "resumed_seconds", "repeated_steps", "lost", "repeated"}.

    Raises:
        UsageError: an option is invalid; nothing was started.
        CommandError: the run did not continue, lost or repeated samples, or left processes or files.
    """
    faults = ["worker"] * options.kills or _faults(options.faults)
    of_kill = EPOCHS_OF_KILL_ON_GPU if options.gpu else EPOCHS_OF_KILL
    epochs = max(DEFAULT_EPOCHS, of_kill * options.kills) if options.epochs is None else options.epochs
    require_writable("--json", options.json)
    from tests.support.chaos.experiment import ChaosExperiment, gpus_of  # imports Ray and torch: seconds

    experiment = ChaosExperiment(
        faults,
        gpus=gpus_of(options.workers_per_node) if options.gpu else 0,
        nodes=options.nodes,
        workers=options.workers_per_node,
        epochs=epochs,
        report=_report,
    )
    began = time.monotonic()
    found = experiment.run()
    result = {
        "command": "chaos",
        "machine": machine(),
        "settings": asdict(replace(options, epochs=epochs)),
        **found,
        "seconds": round(time.monotonic() - began, 1),
    }
    if options.json:
        write_json(result, options.json)
    _show(result)
    if wrong := failures(result):
        raise CommandError("; ".join(wrong))
    return result


def failures(result: dict[str, Any]) -> list[str]:
    """Describe each failure in a result; return an empty list if there is none."""
    rows, left = result["rows"], result["left"]
    lost, repeated = sum(row["lost"] for row in rows), sum(row["repeated"] for row in rows)
    counted = [
        (result["over"], result["over"]),
        (lost, f"{lost} samples were lost"),
        (repeated, f"{repeated} samples were repeated"),
        (
            result["ledger"]["missing"] > MOST_MISSING,
            f"the parts of the ledger miss {result['ledger']['missing']:.1%} of the time that workers were held",
        ),
        (not result["same_stream"], "the samples came in another order than the stream's"),
        (
            not result["losses"]["agree"],
            f"losses differ by up to a share of {result['losses']['largest_difference']:.2g}",
        ),
        *((what, f"left behind, {name.replace('_', ' ')}: {', '.join(map(str, what))}") for name, what in left.items()),
    ]
    return [text for wrong, text in counted if wrong]


def _show(result: dict[str, Any]) -> None:
    lines = [
        [
            row["fault"],
            number(row["noticed_seconds"], ".1f", " s"),
            row["noticed_by"],
            number(row["resumed_seconds"], ".1f", " s"),
            number(row["repeated_steps"]),
            number(row["lost"]),
            number(row["repeated"]),
        ]
        for row in result["rows"]
    ]
    columns = ["fault", "noticed after", "by", "resumed after", "steps done again", "samples lost"]
    show(f"{result['settings']['nodes']} nodes on {result['machine']['cpus']} cores", [*columns, "repeated"], lines)
    ledger = {part: seconds for part, seconds in result["ledger"].items() if seconds and part != "missing"}
    print(f"the ledger, in seconds of workers: {', '.join(f'{part} {each:.1f}' for part, each in ledger.items())}")
    losses, left = result["losses"], result["left"]
    epochs, largest = len(losses["disturbed"]), losses["largest_difference"]
    print(
        f"the losses of {plural(epochs, 'epoch')} differ by at most a share of {largest:.2g} from the undisturbed run's"
    )
    print(", ".join(f"{name.replace('_', ' ')} left: {len(what)}" for name, what in left.items()))


def _faults(listed: str) -> list[str]:
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            raise UsageError(f"--faults {name} is unknown: choose from {','.join(NAMES)}")
    return names


def _report(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    mark_warnings()
    try:
        main(parse_options(Chaos, sys.argv[1:], "python -m tests.support.chaos"))
    except (UsageError, CommandError) as error:
        sys.exit(f"error: {error}")
