"""`raydali replay`: make steps of a run again, and show what they saw.

    raydali replay ~/raydali-runs/pets --step 1234
    raydali replay pets --step 1234 --to 1236 --against ~/raydali-runs/pets/samples

One process trains from the newest checkpoint before the step, with all micro-batches of each step one after another.
What it finds is printed, and stays in a folder of its own; nothing is written to the run:

    replay.json                   ids, files, draws, losses, gradients and activations
    step-000001234-rank-0.png     the pictures as the network got them, of each rank, largest losses first
"""

import math
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from raydali.commands.preview import device_of
from raydali.commands.replay_sheet import rank_of_loss, replay_sheet
from raydali.data.index.source import classes_of
from raydali.errors import CommandError, UsageError
from raydali.options.placement import require
from raydali.output import show, write_json, write_output
from raydali.text import error_line, printable

if TYPE_CHECKING:
    from raydali.run.folder import RunFolder

RESULT = "replay.json"
KEYS = "micro_batch", "id", "read", "epoch", "repeat"
"""`--against` compares these of each sample; with the seed, they decide all that is drawn for it."""
SHOWN = 10
"""Rows of a printed table."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Make steps of a run again: their samples, draws, pictures, losses, gradients and activations."""

    run: tyro.conf.Positional[str]
    """Folder of the run, such as ~/raydali-runs/pets or s3://bucket/runs/pets."""
    step: int
    """The step, counted from 0, as warnings name it."""
    to: int | None = None
    """The last step, if more than one are shown."""
    against: str | None = None
    """Folder samples/, which a run has with --trace-samples, to compare with."""
    job: str | None = None
    """Name or file of the run's job. Default: the one that the run names, in this folder if it is yours."""
    data: str | None = None
    """Place of the run's data on this machine. Default: as in the run."""
    device: str | None = None
    """Device that trains: cpu, or the number of a GPU. Default: 0, or cpu on a machine without a GPU."""
    show: int = 8
    """Number of pictures of each micro-batch to draw, those with the largest losses."""
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Folder for the results. Default: replay-NAME-STEP."""


def main(options: Replay) -> None:
    """Make the steps again, and show them.

    Raises:
        UsageError: the run or an option cannot be used.
        CommandError: only a part could be shown, or it differs from what is compared; what there is was written.
    """
    require(options, "step", least=0)
    require(options, "show", least=1)
    # All that needs no PyTorch, whose import takes seconds.
    from raydali.inference.job_module import found_run

    run, device = found_run(options.run, options.job), device_of(options.device)

    from raydali.inference.replay import replay
    from raydali.inference.trained_run import options_of

    config, settings = options_of(run)
    if options.data is not None:
        config = replace(config, data=options.data)
    steps = range(options.step, (options.step if options.to is None else options.to) + 1)
    last = config.stream(settings["samples"]).steps - 1
    if not steps or steps[-1] > last:
        asked = f"--step {options.step}" + ("" if options.to is None else f" --to {options.to}")
        raise UsageError(f"{asked} is not in {run.folder}, whose steps are 0 to {last}: give others, in this order")
    output = _made_output(options, run.folder)
    logged = [] if options.against is None else _logged(options.against, steps)
    result, source = replay(run, config, settings, steps, device)
    write_json(_as_json(result), str(output / RESULT))
    trained, classes = [row for row in result["steps"] if "loss" in row], () if source is None else classes_of(source)
    for row in trained:
        for rank in sorted({batch["rank"] for batch in row["micro_batches"]}):
            title = f"Step {row['step']} of {run.folder.name}, rank {rank}"
            mine = [batch for batch in row["micro_batches"] if batch["rank"] == rank]
            if (sheet := replay_sheet(title, result["notes"], mine, classes, options.show)) is not None:
                write_output(str(output / f"step-{row['step']:09d}-rank-{rank}.png"), sheet)
    for note in result["notes"]:
        print(printable(note))
    _print_tables(trained)
    print(f"{output}: {RESULT}" + (" and the pictures of each rank" if trained else ""))
    differing = _compare(result["steps"], logged, options.against)
    if result["failed"]:
        known = "ids and files" if source is not None else "ids" if result["steps"][0]["micro_batches"] else "nothing"
        raise CommandError(f"{output}/{RESULT} has only what is known without training, {known}: {result['failed']}")
    if differing:
        raise CommandError(differing)


def _made_output(options: Replay, run: "RunFolder") -> Path:
    """Make the folder for the results, and return it; raise a UsageError if it may not or cannot be written."""
    asked = options.output or f"replay-{run.name}-{options.step}"
    output = Path(asked).expanduser().absolute()
    if "://" in asked or output.resolve().is_relative_to(Path(run.path()).resolve()):
        raise UsageError(f"--output {asked} is not on this machine, or in the run's folder: give another local folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=output):  # what rights permit is not all
            pass
    except OSError as error:
        raise UsageError(f"--output {asked} cannot be written: {error.strerror}; give another folder") from error
    return output


def _as_json(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a value without tensors, and with texts in place of numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _as_json(item) for name, item in value.items() if name not in ("inputs", "tensors")}
    if isinstance(value, list):
        return [*map(_as_json, value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _logged(path: str, steps: range) -> list[dict[str, Any]]:
    """Return the rows that a trace of samples has of these steps; raise a UsageError if it has none."""
    from raydali.run.find import place_of
    from raydali.run.folder import RunFolder
    from raydali.run.sample_trace import read_trace

    storage, _, name = place_of(path).rpartition("/")
    try:
        rows, why = read_trace(RunFolder(storage or "/", name), steps), "it has none of these steps"
    except (OSError, ValueError, KeyError) as error:
        rows, why = [], error_line(error)[:60]
    if not rows:
        raise UsageError(f"--against {path} cannot be compared with ({why}): give samples/ of the run")
    return rows


def _compare(rows: list[dict[str, Any]], logged: list[dict[str, Any]], against: str | None) -> str:
    """Print how the steps compare with what was logged; return the first sample that differs, or an empty text."""
    for row in rows if logged else ():
        of_step = [each for each in logged if each["step"] == row["step"]]
        samples = [batch | sample for batch in row["micro_batches"] for sample in batch["samples"]]
        there, here = ([tuple(each[key] for key in KEYS) for each in rows_of] for rows_of in (of_step, samples))
        if there != here:
            was, now = next(pair for pair in zip_longest(there, here) if pair[0] != pair[1])
            names = ", ".join(KEYS).replace("_", "-")
            return f"step {row['step']} differs from {against}: ({names}) is {now}, there {was}"
        loss = of_step[0].get("loss") if of_step else None
        beside = f"; the loss is {row['loss']:.6g}, there {loss:.6g}" if loss is not None and "loss" in row else ""
        print(f"step {row['step']}: ids, substitutes and keys of draws are as in {against}{beside}")
    return ""


def _print_tables(rows: list[dict[str, Any]]) -> None:
    """Print the losses of micro-batches and samples, and for each step its largest gradients and activations."""
    batches = [batch for row in rows for batch in row["micro_batches"]]
    _table("micro-batches", batches, "step", "micro_batch", "rank", "loss")
    samples = [batch | sample for batch in batches for sample in batch["samples"]]
    worst = sorted(samples, key=lambda sample: rank_of_loss(sample["loss"]))[:SHOWN]
    _table("largest losses of single samples", worst, "step", "micro_batch", "id", "loss", "path")
    for row in rows:
        print(f"step {row['step']}: loss {row['loss']:.6g}, gradient norm {row['gradient_norm']:.6g}")
        for title in ("gradients", "activations"):
            largest = sorted(row[title].items(), key=lambda pair: rank_of_loss(pair[1]))[:SHOWN]
            layers = [{"layer": layer, "value": value} for layer, value in largest]
            _table(f"largest {title} of step {row['step']}", layers, "layer", "value")


def _table(title: str, rows: list[dict[str, Any]], *names: str) -> None:
    def cell(value: object) -> str:
        return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)

    if rows:
        show(title, [name.replace("_", "-") for name in names], [[cell(row[name]) for name in names] for row in rows])
