"""`raydali evaluate`: how good the model of a run is.

    raydali evaluate ~/raydali-runs/pets
    raydali evaluate ~/raydali-runs/pets --data ~/other-pets --json pets.json

Each sample counts once, on any number of workers. The result stays in the run's folder, as evaluation.json and
worst.png, and the run's report.html shows it.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from raydali.errors import CommandError, UsageError
from raydali.options.inference import InferenceOptions
from raydali.output import JsonFile, require_there, require_writable, show, write_json
from raydali.text import number, plural, printable, rate_text

if TYPE_CHECKING:
    from raydali.run.folder import RunFolder

CLASSES_SHOWN = 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluate(InferenceOptions):
    """Evaluate the model of a run: metrics, each class, confusions, calibration, the worst samples."""

    data: str | None = None
    """Samples with labels, of the kinds that the job trains on; of a folder with val/ that. Default: the validation
    samples of the run."""
    root: str | None = None
    """Folder or URI that relative paths in a list of --data start from. Default: the list's folder."""
    label_column: str | None = None
    """Column with the labels in a list or Parquet files of --data, by name or number. Default: the run's column."""
    json: JsonFile = None


def main(options: Evaluate) -> None:
    """Compute the outputs for all samples, and print and write the figures.

    Raises:
        UsageError: the run or the data cannot be used.
        DataError, StorageAway, CommandError: samples cannot be read, which all figures leave out, or workers failed.
    """
    # All that needs no PyTorch, whose import takes seconds.
    from raydali.inference.job_module import found_run

    run_and_job = found_run(options.run, options.job)
    require_there("--data", options.data)
    require_writable("--json", options.json)
    columns = {"root": options.root, "label_column": options.label_column}
    for name, value in columns.items():
        if value is not None and options.data is None:
            raise UsageError(f"--{name.replace('_', '-')} {value} is for other samples: give --data too")

    from raydali.inference import workers
    from raydali.inference.check import beside_run
    from raydali.inference.engine import checked_inference, joined
    from raydali.inference.samples import labeled_samples
    from raydali.inference.task_results.task_results import results_class
    from raydali.inference.trained_run import open_run
    from raydali.inference.worst import worst_sheet

    run = open_run(run_and_job, options.checkpoint)
    task_results = results_class(run)(run, *labeled_samples(run, options.data, **columns))
    own = options.data is None
    inference, checked = checked_inference(run, task_results, options, evaluates=True, own_data=own)
    results = [*workers.results(inference, inference.parts, options)]
    every, metrics = joined(results), inference.metrics(results)
    evaluation = task_results.evaluation(every.arrays)
    result: dict[str, Any] = {
        "run": str(run.folder),
        "weights": run.weights.origin,
        "checked": checked.text,
        "time": round(time.time(), 3),
        "data": options.data or getattr(run.config, "val_data", None) or run.config.data,
        "samples": len(every.arrays["ids"]),
        "samples_per_second": len(every.arrays["ids"]) / every.seconds,
        "precision": every.precision,
        **evaluation,
        "metrics": {**metrics, **evaluation["metrics"], **metrics},  # the job's are first, and count
        "broken": [{"id": id, "path": path, "reason": why} for id, (path, why) in sorted(every.broken.items())],
    }
    if own and checked.same_data:
        result["beside_run"] = beside_run(run, metrics)
    if options.json is not None:
        write_json(result, options.json)
    facts = [f"{run.weights.origin} on {result['data'] or 'the built-in data'}", task_results.legend]
    draw = partial(task_results.picture, arrays=every.arrays)
    page = _keep(run.folder, result, worst_sheet(result["worst"], draw, run.folder.name, facts))
    _print(result, task_results.noun)
    if page is not None:
        print(page)
    if every.broken:
        raise CommandError(f"all figures leave out {plural(len(every.broken), task_results.noun)} that cannot be read")


def _print(result: Mapping[str, Any], noun: str) -> None:
    rate = f"{rate_text(result['samples_per_second'])} {noun}s/s in {result['precision']}"
    print(f"{result['run']}, {result['weights']}: {plural(result['samples'], noun)}, {rate}")
    print(result["checked"])
    show("", ["metric", "value"], [(name, f"{value:.4g}") for name, value in result["metrics"].items()])
    if beside := result.get("beside_run"):
        print(beside)
    if rows := result["classes"]:
        names = [*rows[0]]
        ordered = rows
        if len(rows) > CLASSES_SHOWN:
            worst_first = sorted(rows, key=lambda row: (row[names[2]] is None, row[names[2]]))
            ordered = worst_first[:CLASSES_SHOWN]
            print(f"the {CLASSES_SHOWN} classes with the lowest {names[2]} of {len(rows)}:")
        show(
            "",
            names,
            [[row[names[0]], str(row[names[1]]), *(number(row[name], ".4f") for name in names[2:])] for row in ordered],
        )
        for pair in result.get("confusions", ())[:5]:
            amount = plural(pair["samples"], names[1].removesuffix("s"))
            print(f"{pair['class']!r} predicted as {pair['predicted']!r}: {amount}")
    for broken in result["broken"][:CLASSES_SHOWN]:
        print(printable(f"left out {broken['path']}: {broken['reason']}"))


def _keep(folder: "RunFolder", result: Mapping[str, Any], worst: bytes | None) -> str | None:
    """Write the result into the run's folder, and the run's report again; return its path, or None if it cannot be."""
    from raydali.data.read.storage import reason
    from raydali.report.html.history import History
    from raydali.report.html.page import run_page
    from raydali.run.folder import EVALUATION, REPORT, WORST

    written = EVALUATION
    try:
        folder.write_json(EVALUATION, result)
        written = WORST
        if worst is not None:
            folder.write(WORST, worst)
        elif folder.exists(WORST):
            folder.remove(WORST)
        written = REPORT
        folder.write(REPORT, run_page(History.read(folder)))
    except OSError as error:
        _log.warning("%s/%s cannot be written: %s", folder, written, reason(error))
    except (UsageError, ValueError) as error:  # an epoch or a setting that cannot be read
        _log.warning("%s/%s cannot be written: %s", folder, REPORT, error)
    else:
        return f"{folder}/{REPORT}"
    return None
