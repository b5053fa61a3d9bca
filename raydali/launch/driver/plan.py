"""Plan a run: train for a short time as the job would, and forecast the whole run."""

import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from json import dumps
from typing import Any

from raydali.data.stream.stream import largest_divisor
from raydali.errors import UsageError
from raydali.launch.driver.launcher import launch
from raydali.launch.driver.resume import previous_run
from raydali.launch.job import Job
from raydali.measure.forecast import OF_LENGTH, Forecast, Measured
from raydali.measure.memory import OUT_OF_MEMORY
from raydali.options.every_job import TrainingOptions
from raydali.output import gpu_names, show, write_json
from raydali.report.console import Console
from raydali.report.html.text import NOT_MEASURED
from raydali.run.find import KEPT, name_of, newest_step
from raydali.run.folder import CONFIG, EPOCHS, EVENTS, RunFolder
from raydali.run.ledger import LEDGER
from raydali.run.messages import Message, Note, RankWarning
from raydali.text import duration, plural, rate_text

WHOLE_RUN: Mapping[str, Any] = {
    "track": None,
    "trace_samples": False,
    "profile_steps": None,
    "max_failures": 0,
    "patience": None,
    "stop_after": None,
}
"""Options that a short run has no use for, and their values there."""
MEMORY_SECONDS = 1.0
"""Length of a run that measures the memory."""
COMPILED_SECONDS = 10.0
"""A compilation that takes longer found no code of an earlier start on its node; the planned run will find it."""
GPUS = 1, 2, 4, 8, 16, 32, 64


class _QuietConsole(Console):
    """Shows warnings and what takes long; the epochs of a short run would only confuse."""

    def print(self, text: str) -> None:
        pass

    def show(self, message: Message) -> None:
        match message:
            case Note():
                super().print(message.text)
            case RankWarning():
                super().show(message)


def plan(
    job: Job[Any], options: TrainingOptions, *, seconds: float, gpus: int, bandwidth: float | None, json: str | None
) -> None:
    """Plan a run with these options of the job; print the table, and write the file of `--json`.

    The other arguments are the options of `raydali plan`; for the errors see `launch`.
    """
    with redirect_stdout(sys.stderr) if json == "-" else nullcontext():
        forecast = _planned(job, options, seconds, gpus, bandwidth)
        _show(forecast)
        if options.stop_after is not None:
            print(f"--stop-after {options.stop_after}: the forecast is for these epochs of {options.epochs}")
        if options.patience is not None:
            print(f"--patience {options.patience}: the run may end earlier")
    if json == "-":
        print(dumps(forecast, indent=2))
    elif json is not None:
        write_json(forecast, json)


def with_largest_batch(job: Job[Any], given: TrainingOptions) -> TrainingOptions:
    """Return the options with the largest `batch_size` that fits into the GPUs, or with the run's own, if it exists.

    A short run measures the memory at the given size, or at smaller ones if that does not fit; a second one proves the
    size that was found. With shards over a number of workers that may change, it has the fewest, whose are the largest.

    Raises:
        UsageError: there are no GPUs, or not even one sample fits; and see `launch`.
    """
    if given.name is not None and (earlier := previous_run(RunFolder(given.storage, given.name))) is not None:
        return replace(given, batch_size=earlier.settings["batch_size"])
    if given.no_gpu or not (gpu_names() or os.environ.get("RAY_ADDRESS")):
        raise UsageError("--batch-size auto measures the memory of GPUs, and there are none: give a number")
    whole, size, fits = given.global_batch_size, given.batch_size, 0
    least, most = given.worker_range or (1, 1)
    while True:
        if whole is not None:  # it is a whole number of micro-batches
            size = largest_divisor(whole, size)
        Console().print(f"--batch-size auto: trying {size}")
        trial = replace(given, batch_size=size)
        if given.shard is not None and least < most:  # each has as many micro-batches as in the run
            trial = replace(trial, workers=str(least), global_batch_size=whole or size * most)
        try:
            with _short_run(job, trial, MEMORY_SECONDS, ceiling=False) as folder:
                settings, measured = folder.read_json(CONFIG), Measured(folder.rows(EPOCHS), size, 0)
        except UsageError as error:
            if OUT_OF_MEMORY not in str(error) or size == 1:
                raise
            size = size * 7 // 8 if fits else size // 2
            continue
        if fits or measured.largest_batch_size is None:
            return replace(given, batch_size=size)
        samples = settings["samples"] if whole is None else whole
        fits = min(measured.largest_batch_size, samples // max(measured.workers, most))
        if fits == size:
            return replace(given, batch_size=size)
        size = fits


@contextmanager
def _short_run(job: Job[Any], options: TrainingOptions, seconds: float, **changes: Any) -> Iterator[RunFolder]:
    """Run a job for a short time, with `changes` of its options; yield the folder of the run, which is removed then.

    Raises:
        UsageError: the job does not train by raydali's loop; and see `launch`.
    """
    if not isinstance(options, TrainingOptions):
        raise UsageError(f"{job.name} has a training loop of its own, of which raydali cannot run a part")
    folder = RunFolder(options.storage, f"plan-{secrets.token_hex(4)}")
    try:
        launch(job, replace(options, name=folder.name, **WHOLE_RUN, **changes), _QuietConsole(), seconds)
        yield folder
    finally:
        with suppress(OSError):
            folder.remove_folder("")


def _planned(
    job: Job[Any], options: TrainingOptions, seconds: float, gpus: int, bandwidth: float | None
) -> dict[str, Any]:
    print(f"training for {seconds:g} s in a folder of its own in {options.storage}", flush=True)
    with _short_run(job, options, seconds) as folder:
        (group,) = folder.read_json(LEDGER)["groups"]
        if not compiled_anew(folder.read_json(CONFIG), group["phases"]):
            return _forecast(folder, options, gpus, bandwidth, group["waited"])
    print("training once more: a run that starts now finds the code that was compiled", flush=True)
    with _short_run(job, options, seconds) as folder:  # this one has waited since the driver began, for the first, too
        return _forecast(folder, options, gpus, bandwidth, group["waited"])


def compiled_anew(settings: Mapping[str, Any], phases: Mapping[str, float]) -> bool:
    """Return whether a run compiled what a later one finds: the phase is its first step, which may be slow anyway."""
    return bool(settings.get("compile")) and phases.get("compile", 0.0) > COMPILED_SECONDS


def _forecast(
    folder: RunFolder, options: TrainingOptions, gpus: int, bandwidth: float | None, waited: float
) -> dict[str, Any]:
    ended, records, settings = time.time(), folder.rows(EPOCHS), folder.read_json(CONFIG)
    (group,) = folder.read_json(LEDGER)["groups"]
    events = folder.rows(EVENTS)
    closed = sum(record["seconds"] + ((record["validation"] or {}).get("seconds") or 0.0) for record in records)
    begun, trained = group["joules_begun"], group["released"] - group["begun"]
    step = newest_step(folder) or 0
    sizes = {name: sum(info.size or 0 for info in folder.infos(name)) for name in (name_of(step), "best")}
    costs = next((event["costs"] for event in events if event["event"] == "sizes"), ())
    measured = Measured(records, settings["batch_size"], settings["checkpoint_every"], costs)
    run = Forecast(
        **{name: settings[name] for name in ("samples", "batch_size", "checkpoint_every")},
        epochs=options.most_epochs,
        validations=sum(map(options.validates, range(options.most_epochs))),
        measured=measured,
        before_placement=waited,
        starting=group["begun"] - group["placed"],
        ending=max(0.0, group["released"] - group["begun"] - closed - group["measured"]) + ended - events[-1]["time"],
        starting_joules=begun,
        watts=None if None in (begun, group["joules"]) else (group["joules"] - begun) / trained,
        price=options.price,
        weights_bytes=sizes["best"],
        state_bytes=sizes[name_of(step)],
        sharded_over=options.sharded_over,
        bandwidth=None if bandwidth is None else bandwidth * 1e9,
    )
    workers, batch = group["workers"], settings["global_batch_size"]
    others = [number for number in GPUS if number <= gpus and measured.on_gpus]
    others = [number for number in others if not number % options.sharded_over(number)]
    # A global batch that was not given grows with the number of workers.
    batches = {count: batch if options.global_batch_size else batch * count // workers for count in {workers, *others}}
    rows = {count: run.row(count, of) for count, of in sorted(batches.items()) if count * settings["batch_size"] <= of}
    kept = KEPT + 1 + (run.epochs // settings["keep_epochs"] if settings["keep_epochs"] else 0)
    row, seconds = rows[workers], run.costs(batch)
    cause = max(seconds, key=lambda name: seconds[name])
    verdict = measured.typical["verdict"]
    return {
        **{name: value for name, value in row.items() if name not in ("gpus", "estimated", "bandwidth", "fits")},
        "memory_total_bytes": measured.memory_total_bytes,
        "largest_batch_size": measured.largest_batch_size,
        "disk_bytes": kept * sizes[name_of(step)] + sizes["best"],
        "bottleneck": {
            "cause": cause,
            "share": round(seconds[cause] / (run.epochs * row["epoch_seconds"]), 4),
            "seconds": round(seconds[cause], 1),
        },
        "verdict": None if (verdict or "").partition(":")[0] in OF_LENGTH else verdict,
        "gpus": [*rows.values()],
        "measured": {
            "steps": sum(record["ranks"][0]["steps"] for record in records),
            "start_seconds": round(run.before_placement + run.starting + measured.start_extra_seconds, 3),
            "step_seconds": round(measured.step, 6),
            "exchange_seconds": round(measured.exchange, 6),
            "validation_seconds": round(measured.validation(workers), 3),
            "checkpoint_seconds": round(measured.checkpoint, 4),
            "end_seconds": round(run.ending, 3),
        },
    }


def _memory(row: dict[str, Any], measured: int) -> str:
    size = f"{row['memory_bytes'] / 2**30:.1f} GiB"
    if row["workers"] == measured:
        return size
    return f"at most {size}" if row["fits"] else f"{size} may not fit"


def _show(forecast: dict[str, Any]) -> None:
    rows, names = [], ["on", "global batch", "the run", "an epoch", "images/s", "goodput", "kWh", "cost"]
    if shards := any(row["sharded_over"] > 1 for row in forecast["gpus"]):
        names.append("memory")
    for row in forecast["gpus"]:
        what = plural(row["gpus"], "GPU") if row["gpus"] else f"{plural(row['workers'], 'worker')} on CPUs"
        assumed = f", at {row['bandwidth'] / 1e9:g} GB/s" if row["bandwidth"] else ""
        rows.append(
            (
                f"{what} (estimated{assumed})" if row["estimated"] else what,
                str(row["global_batch_size"]),
                duration(row["run_seconds"]),
                duration(row["epoch_seconds"]),
                rate_text(row["images_per_second"]),
                NOT_MEASURED if row["goodput"] is None else f"{row['goodput']:.1%}",
                NOT_MEASURED if row["kwh"] is None else f"{row['kwh']:.3g}",
                "-" if row["cost_usd"] is None else f"${row['cost_usd']:,.2f}",
                *([_memory(row, forecast["workers"])] if shards else []),
            )
        )
    show("", names, rows)
    fits = forecast["largest_batch_size"]
    over = f", sharded over {forecast['sharded_over']}" if forecast["sharded_over"] > 1 else ""
    print(f"memory of a worker: {forecast['memory_bytes'] / 2**30:.2f} GiB{over}", end="")
    print(f"; the largest --batch-size that fits: about {fits}" if fits else "")
    print(f"disk for checkpoints: {forecast['disk_bytes'] / 1e9:.3g} GB")
    bottleneck = forecast["bottleneck"]
    saved = duration(bottleneck["seconds"])
    print(f"largest cost besides the steps: {bottleneck['cause']}, {bottleneck['share']:.0%} of an epoch: {saved}")
    if forecast["verdict"]:
        print(forecast["verdict"])
