"""`raydali replay`: make steps of a run again, and show what they saw.

    raydali replay ~/raydali-runs/pets --step 1234
    raydali replay pets --step 1234 --to 1236 --against ~/raydali-runs/pets/samples

One process trains from the newest checkpoint before the step, with all micro-batches of each step one after another.
What it finds is printed, and stays in a folder of its own; nothing is written to the run:

    replay.json                   ids, files, draws, losses, gradients and activations
    step-000001234-rank-0.png     the pictures as the network got them, of each rank, largest losses first
"""

import math
import re
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import tyro

from raydali.commands.preview import device_of
from raydali.commands.replay_sheet import rank_of_loss, replay_sheet
from raydali.data.index.source import Source
from raydali.errors import CommandError, RaydaliError, UsageError
from raydali.options.placement import require
from raydali.output import show, write_json, write_output
from raydali.text import error_line, printable

RESULT = "replay.json"
KEYS = "id", "read", "epoch", "repeat"
"""Columns that `--against` compares for each sample; with the seed, they decide all that is drawn for it."""
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

    from raydali.inference.replay import add_files, checked_data, made_again, rows_of, start_of, why_other
    from raydali.inference.trained_run import options_of

    config, settings = options_of(run)
    if options.data is not None:
        config = replace(config, data=options.data)
    steps = range(options.step, (options.step if options.to is None else options.to) + 1)
    last = config.stream(settings["samples"]).steps - 1
    if not steps or steps[-1] > last:
        asked = f"--step {steps.start}" + ("" if options.to is None else f" --to {options.to}")
        raise UsageError(f"{asked} is not in {run.folder}, whose steps are 0 to {last}: give others, in this order")
    output = Path(options.output or f"replay-{run.folder.name}-{options.step}").expanduser().absolute()
    if output.resolve().is_relative_to(Path(run.folder.path()).resolve()):
        raise UsageError(f"--output {output} is in the run's folder, which stays as it is: give another")
    if "://" in (options.output or ""):
        raise UsageError(f"--output {options.output} is not on this machine: give a local folder")
    logged = {} if options.against is None else _logged(options.against, steps)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=output):  # what rights permit is not all
            pass
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}; give another folder") from error
    begun = start_of(run, steps.start)
    notes, failed = [*why_other(run, config, begun, device)], ""
    source: Source | None = None
    rows: list[dict[str, Any]] = []
    try:
        data = checked_data(run, config, settings, notes)
        source = data.train
        rows = made_again(run, config, data, steps, device, notes)
    except Exception as error:  # data, a job or a PyTorch that have changed may raise anything; the rest is shown
        failed = str(error) if isinstance(error, RaydaliError) else error_line(repr(error))
    rows, pipeline = rows or rows_of(config, settings["samples"], source, steps), run.job.train_pipeline(config)
    for batch in (batch for row in rows for batch in row["micro_batches"]):
        add_files(batch, source, pipeline)
        there = logged.get((batch["step"], batch["micro_batch"]), {})
        batch["rank"] = there.get("rank", batch["micro_batch"] % begun.get("world_size", 1))
    result = {"run": str(run.folder), "notes": notes, "failed": failed, "steps": rows}
    write_json(_as_json(result), str(output / RESULT))
    for row in rows:
        for rank in sorted({batch["rank"] for batch in row["micro_batches"]}):
            title = f"Step {row['step']} of {run.folder.name}, rank {rank}"
            mine = [batch for batch in row["micro_batches"] if batch["rank"] == rank]
            if (sheet := replay_sheet(title, notes, mine, source, options.show)) is not None:
                write_output(str(output / f"step-{row['step']:09d}-rank-{rank}.png"), sheet)
    _print(rows, notes, output)
    differing = _compare(rows, logged, options.against)
    if failed:
        known = "ids and files" if source is not None else "ids" if rows[0]["micro_batches"] else "nothing"
        raise CommandError(f"{output}/{RESULT} has only what is known without training, {known}: {failed}")
    if differing:
        raise CommandError(differing)


def _as_json(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a value without tensors, and with texts in place of numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _as_json(item) for name, item in value.items() if name not in ("inputs", "tensors")}
    if isinstance(value, list):
        return [*map(_as_json, value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _logged(path: str, steps: range) -> dict[tuple[int, int], dict[str, Any]]:
    """Return what a trace has of each micro-batch of these steps: "rank", "loss" of the step, and "samples".

    Raises:
        UsageError: it has nothing of them, or cannot be read.
    """
    from pyarrow import parquet

    from raydali.run.find import place_of
    from raydali.run.folder import RunFolder

    found = dict[tuple[int, int], dict[str, Any]]()
    storage, _, name = place_of(path).rpartition("/")
    try:
        folder = RunFolder(storage or "/", name)
        for file in folder.files(""):
            match = re.fullmatch(r"step-(\d+)-(\d+)-rank-\d+\.parquet", file)
            if match is None or int(match[2]) < steps.start or int(match[1]) >= steps.stop:
                continue
            for row in parquet.read_table(BytesIO(folder.read(file))).to_pylist():
                if row["step"] in steps:
                    of_batch = found.setdefault((row["step"], row["micro_batch"]), {**row, "samples": []})
                    read = row["id"] if row["replaced_by"] is None else row["replaced_by"]
                    of_batch["samples"].append((row["id"], read, row["epoch"], row.get("repeat") or 0))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"--against {path} cannot be read ({error_line(error)[:60]}): give a run's samples/"
        ) from error
    if not found:
        raise UsageError(f"--against {path} has nothing of these steps: give samples/ of the run")
    return found


def _compare(rows: list[dict[str, Any]], logged: dict[tuple[int, int], dict[str, Any]], against: str | None) -> str:
    """Print how the steps compare with what was logged; return the first sample that differs, or an empty text."""
    for row in rows if against is not None else ():
        for batch in row["micro_batches"]:
            there = logged.get((row["step"], batch["micro_batch"]), {"samples": []})["samples"]
            here = [tuple(sample[key] for key in KEYS) for sample in batch["samples"]]
            if there != here:
                pairs = (pair for pair in zip_longest(there, here) if pair[0] != pair[1])
                (was, now) = next(pairs)
                where = f"step {row['step']}, micro-batch {batch['micro_batch']}"
                return f"{where} differs from {against}: ({', '.join(KEYS)}) is {now}, there {was}"
        loss = next((each.get("loss") for key, each in logged.items() if key[0] == row["step"]), None)
        beside = f"; the loss is {row['loss']:.6g}, there {loss:.6g}" if loss is not None and "loss" in row else ""
        print(f"step {row['step']}: ids, substitutes and keys of draws are as in {against}{beside}")
    return ""


def _print(rows: list[dict[str, Any]], notes: list[str], output: Path) -> None:
    for note in notes:
        print(printable(note))
    if trained := [row for row in rows if "loss" in row]:
        batches = [batch for row in trained for batch in row["micro_batches"]]
        _table("", batches, "step", "micro_batch", "rank", "loss")
        samples = [batch | sample for batch in batches for sample in batch["samples"]]
        worst = sorted(samples, key=lambda sample: rank_of_loss(sample["loss"]))[:SHOWN]
        _table("largest losses of single samples", worst, "step", "micro_batch", "id", "loss", "path")
    for row in trained:
        print(f"step {row['step']}: loss {row['loss']:.6g}, gradient norm {row['gradient_norm']:.6g}")
        for title in ("gradients", "activations"):
            largest = sorted(row[title].items(), key=lambda pair: rank_of_loss(pair[1]))[:SHOWN]
            layers = [{"layer": layer, "value": value} for layer, value in largest]
            _table(f"largest {title} of step {row['step']}", layers, "layer", "value")
    print(f"{output}: {RESULT}" + (" and the pictures of each rank" if trained else ""))


def _table(title: str, rows: list[dict[str, Any]], *names: str) -> None:
    def cell(value: object) -> str:
        return f"{value:.6g}" if isinstance(value, float) else printable(str("-" if value is None else value))

    show(title, [name.replace("_", "-") for name in names], [[cell(row[name]) for name in names] for row in rows])
