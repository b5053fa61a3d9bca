"""`raydali bench scale`: what grows with the number of workers, measured on this machine without starting them.

    raydali bench scale
    raydali bench scale --ranks 1,64,1024 --samples 14000000 --epochs 300 --json scale.json

Each row is the very code that a run goes through, fed with as many ranks' records, files or connections as a run of
that size has; nothing is extrapolated. Ranks that must speak to each other are threads of this process, so their times
are for all of them together on this machine's cores, and an upper bound of what a cluster's cores need.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from raydali.bench.common import shared_options
from raydali.errors import CommandFailed, UsageError
from raydali.output import JsonFile, machine, require_writable, show, write_json
from raydali.text import number

MAX_RANKS = 16_384
MAX_MESHED = 128
"""Ranks of which each is connected with each other: 16,000 sockets."""


@dataclass(frozen=True, kw_only=True)
class ScaleBench:
    """What grows with the number of workers: reports, traces, rendezvous, the index; measured without starting them."""

    ranks: str = "1,8,64,128,1024"
    """Numbers of workers."""
    samples: int = 1_281_167
    """Of the training data."""
    epochs: int = 90
    """Of the run."""
    batch_size: int = 256
    """Of each worker."""
    json: JsonFile = None


@dataclass(frozen=True)
class Quantity:
    """A row: what is measured, and how.

    Attributes:
        name: for the table.
        unit: of the figures.
        measure: the figure for so many ranks; None where it is not measured for so many.
    """

    name: str
    unit: str
    measure: Callable[[int], float | None]


def main(options: ScaleBench) -> dict[str, Any]:
    """Measure, show, write.

    Returns:
        What --json writes: {"command", "machine", "settings", "rows"}. A row: {"name", "unit", "figures": by the number
        of ranks, null where not measured}.

    Raises:
        UsageError: an option that cannot be met; before anything is measured.
        CommandFailed: something could not be measured; after the other figures were shown and written.
    """
    ranks = _ranks(options.ranks)
    shared_options.check_positive(options, ("samples", "epochs", "batch_size"))
    require_writable("--json", options.json)
    if options.samples < options.batch_size * ranks[-1]:
        raise UsageError(
            f"{options.samples} samples are fewer than the {options.batch_size * ranks[-1]} of one step of {ranks[-1]} "
            f"workers: raise --samples, or lower --ranks or --batch-size"
        )
    from raydali.bench.loader.measurement import MeasurementFailed

    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for quantity in _quantities(options):
        figures: dict[int, float | None] = {}
        for count in ranks:
            try:
                figures[count] = quantity.measure(count)
            except MeasurementFailed as error:
                figures[count] = None
                failed.append(f"{quantity.name}, {count}: {error}")
            print(f"{quantity.name}, {count}: {_text(figures[count], quantity.unit)}", file=sys.stderr, flush=True)
        rows.append({"name": quantity.name, "unit": quantity.unit, "figures": figures})
    result = {"command": "bench scale", "machine": machine(), "settings": asdict(options), "rows": rows}
    title = f"{options.samples:,} samples, {options.epochs} epochs, batches of {options.batch_size} a worker"
    lines = [[row["name"], *(_text(figure, row["unit"]) for figure in row["figures"].values())] for row in rows]
    show(title, ["workers", *(f"{count:,}" for count in ranks)], lines)
    if options.json:
        write_json(result, options.json)
    if failed:
        raise CommandFailed("\n".join(failed))
    return result


def _ranks(listed: str) -> list[int]:
    counts = shared_options.integers(listed)
    if not counts or not 1 <= counts[0] <= counts[-1] <= MAX_RANKS:
        raise UsageError(f"--ranks must be numbers from 1 to {MAX_RANKS} such as 1,64,1024, not {listed!r}")
    return counts


def _quantities(options: ScaleBench) -> list[Quantity]:
    from raydali.bench.scale import components as parts
    from raydali.bench.scale import rendezvous as meeting

    samples, epochs = options.samples, options.epochs
    of = samples, options.batch_size

    def meshed(what: str) -> Callable[[int], float | None]:
        return lambda ranks: getattr(meeting.mesh(ranks), what) if ranks <= MAX_MESHED else None

    return [
        Quantity("rank 0 takes in the ranks' records, an epoch", "s", parts.gather_seconds),
        Quantity("rank 0 merges and writes an epoch's line", "s", parts.line_seconds),
        Quantity("an epoch's line, sent to the driver too", "B", parts.line_bytes),
        Quantity("epochs.jsonl of the run", "B", lambda ranks: epochs * parts.line_bytes(ranks)),
        Quantity("reading epochs.jsonl of the run", "s", lambda ranks: parts.read_seconds(ranks, epochs)),
        Quantity("memory of all its lines", "B", lambda ranks: epochs * parts.line_memory(ranks)),
        Quantity("a rank's next micro-batch from the stream", "s", lambda ranks: parts.next_seconds(ranks, *of)),
        Quantity("a rank writes an epoch's trace", "s", lambda ranks: parts.trace_seconds(ranks, *of)),
        Quantity("an epoch's trace, all ranks", "B", lambda ranks: parts.trace_bytes(ranks, *of)),
        Quantity("the index, once a node", "B", lambda ranks: parts.index_bytes(samples)),
        Quantity("the index, made ready on a node", "s", lambda ranks: parts.index_seconds(samples)),
        Quantity("all ranks meet at the store", "s", meeting.store_seconds),
        Quantity("all ranks connect with each other (gloo)", "s", meshed("connect")),
        Quantity("a barrier of all ranks (gloo)", "s", meshed("barrier")),
    ]


def _text(figure: float | None, unit: str) -> str:
    if figure is None:
        return "-"
    if unit == "B":
        scale, prefix = next(((s, p) for s, p in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if figure >= s), (1, ""))
        return f"{number(figure / scale, '.3g')} {prefix}B"
    scale, prefix = next(((s, p) for s, p in ((1, ""), (1e-3, "m")) if figure >= s), (1e-6, "µ"))
    return f"{number(figure / scale, '.3g')} {prefix}s"
