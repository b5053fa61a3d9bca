"""`raydali bench scale`: costs that grow with the number of workers, measured on this machine without starting them.

    raydali bench scale
    raydali bench scale --ranks 1,64,1024 --samples 14000000 --epochs 300 --json scale.json

Each row runs the code of a real run with the records, files or connections of that many ranks; nothing is
extrapolated. Ranks that must communicate are threads of this process, so their times are for all of them together on
this machine's cores: an upper bound of what a cluster's cores need.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from raydali.bench.common.options import check, integers
from raydali.bench.common.processes import MeasurementError
from raydali.bench.common.results import present, result_of
from raydali.errors import CommandError, UsageError
from raydali.output import JsonFile, show
from raydali.text import number, plural

MAX_RANKS = 16_384
MAX_MESHED = 128
"""Maximum number of ranks that are all connected with each other: 16,000 sockets."""


@dataclass(frozen=True, kw_only=True)
class ScaleBench:
    """Measure costs that grow with the number of workers (reports, traces, rendezvous, index) without starting them."""

    ranks: str = "1,8,64,128,1024"
    """Numbers of workers."""
    samples: int = 1_281_167
    """Samples of the training data."""
    epochs: int = 90
    """Epochs of the run."""
    batch_size: int = 256
    """Samples per batch and worker."""
    json: JsonFile = None


Quantity = tuple[str, str, Callable[[int], float | None]]
"""A row: its name, its unit, and the function that measures it for a number of ranks; None: not measured."""


def main(options: ScaleBench) -> dict[str, Any]:
    """Measure all quantities, show the table and write the file.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows"}. A row: {"name", "unit", "figures": by the
        number of ranks, null if not measured}.

    Raises:
        UsageError: an option is invalid; before anything is measured.
        CommandError: a quantity could not be measured; after the others were shown and written.
    """
    check(options)
    ranks = integers(options.ranks)
    if not ranks or not 1 <= ranks[0] <= ranks[-1] <= MAX_RANKS:
        raise UsageError(f"--ranks must be numbers from 1 to {MAX_RANKS} such as 1,64,1024, not {options.ranks!r}")
    if options.samples < options.batch_size * ranks[-1]:
        raise UsageError(
            f"--samples must be at least {options.batch_size * ranks[-1]}, one step of {plural(ranks[-1], 'worker')}, "
            f"not {options.samples}: raise it, or lower --ranks or --batch-size"
        )
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for name, unit, measure in _quantities(options):
        figures: dict[int, float | None] = {}
        for count in ranks:
            try:
                figures[count] = measure(count)
            except MeasurementError as error:
                figures[count] = None
                failed.append(f"{name}, {count}: {error}")
            print(f"{name}, {count}: {_text(figures[count], unit)}", file=sys.stderr, flush=True)
        rows.append({"name": name, "unit": unit, "figures": figures})
    result = result_of("bench scale", asdict(options), rows)
    present(result, options, _show_table)
    if failed:
        raise CommandError("\n".join(failed))
    return result


def _show_table(result: dict[str, Any]) -> None:
    settings, rows = result["settings"], result["rows"]
    title = (
        f"{settings['samples']:,} samples, {settings['epochs']} epochs, batches of {settings['batch_size']} a worker"
    )
    lines = [[row["name"], *(_text(figure, row["unit"]) for figure in row["figures"].values())] for row in rows]
    show(title, ["workers", *(f"{count:,}" for count in rows[0]["figures"])], lines)


def _quantities(options: ScaleBench) -> list[Quantity]:
    from raydali.bench.scale import components as parts
    from raydali.bench.scale import rendezvous as meeting

    samples, epochs = options.samples, options.epochs
    of = samples, options.batch_size

    def meshed(what: str) -> Callable[[int], float | None]:
        return lambda ranks: getattr(meeting.mesh(ranks), what) if ranks <= MAX_MESHED else None

    return [
        ("rank 0 takes in the ranks' records, an epoch", "s", parts.gather_seconds),
        ("rank 0 merges and writes an epoch's line", "s", parts.line_seconds),
        ("an epoch's line, sent to the driver too", "B", parts.line_bytes),
        ("epochs.jsonl of the run", "B", lambda ranks: epochs * parts.line_bytes(ranks)),
        ("reading epochs.jsonl of the run", "s", lambda ranks: parts.read_seconds(ranks, epochs)),
        ("memory of all its lines", "B", lambda ranks: epochs * parts.line_memory(ranks)),
        ("a rank's next micro-batch from the stream", "s", lambda ranks: parts.next_seconds(ranks, *of)),
        ("a rank writes an epoch's trace", "s", lambda ranks: parts.trace_seconds(ranks, *of)),
        ("an epoch's trace, all ranks", "B", lambda ranks: parts.trace_bytes(ranks, *of)),
        ("the index, once a node", "B", lambda _: parts.index_bytes(samples)),
        ("the index, made ready on a node", "s", lambda _: parts.index_seconds(samples)),
        ("all ranks meet at the store", "s", meeting.store_seconds),
        ("all ranks connect with each other (gloo)", "s", meshed("connect")),
        ("a barrier of all ranks (gloo)", "s", meshed("barrier")),
    ]


def _text(figure: float | None, unit: str) -> str:
    if figure is None:
        return "-"
    if unit == "B":
        scale, prefix = next(((s, p) for s, p in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if figure >= s), (1, ""))
        return f"{number(figure / scale, '.3g')} {prefix}B"
    scale, prefix = next(((s, p) for s, p in ((1, ""), (1e-3, "m")) if figure >= s), (1e-6, "µ"))
    return f"{number(figure / scale, '.3g')} {prefix}s"
