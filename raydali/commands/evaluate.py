"""`raydali evaluate`: how good the model of a run is.

    raydali evaluate ~/raydali-runs/pets
    raydali evaluate ~/raydali-runs/pets --data ~/other-pets --json pets.json

Each sample counts once, on any number of workers. The result stays in the run's folder, as evaluation.json and
worst.png, and the run's report.html shows it.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from raydali.errors import UsageError
from raydali.inference.options import InferenceOptions
from raydali.output import JsonFile, require_there, require_writable, show, write_json
from raydali.text import number, plural, rate_text

if TYPE_CHECKING:
    from raydali.inference.kinds.kind import Evaluation
    from raydali.inference.session import Joined, Session
    from raydali.run.folder import RunFolder

CLASSES_SHOWN = 20
CONFUSIONS = 100
"""Pairs of classes that are listed, and classes up to which the whole confusion matrix is written."""

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
    """Column with the labels in a list or Parquet files of --data, by name or number. Default: that of the run."""
    json: JsonFile = None


def main(options: Evaluate) -> None:
    """Compute the outputs for all samples, and print and write the figures.

    Raises:
        UsageError: the run or the data cannot be used.
        DataError, StorageAway, CommandError: the samples cannot be read, or workers failed.
    """
    # All that needs no PyTorch, whose import takes seconds.
    from raydali.inference.job_module import job_of
    from raydali.run.find import find_run

    job = job_of(find_run(options.run), options.job)
    require_there("--data", options.data)
    require_writable("--json", options.json)
    given = {"root": options.root, "label_column": options.label_column}
    for name, value in given.items():
        if value is not None and options.data is None:
            raise UsageError(f"--{name.replace('_', '-')} {value} is for other samples: give --data too")
    placement = options.launch

    from raydali.inference.check import beside_run, check_data, check_run
    from raydali.inference.session import joined, labeled_samples, session, validation_samples
    from raydali.inference.trained_run import open_run
    from raydali.inference.worst_sheet import worst_sheet

    run = open_run(options.run, options.checkpoint, job)
    source, classes = validation_samples(run) if options.data is None else labeled_samples(run, options.data, given)
    used = session(run, source, classes, options, evaluates=True)
    checked = check_run(run, used.inference.network, unchecked=options.unchecked)
    if options.data is None:
        check_data(run, checked, unchecked=options.unchecked)
    found = joined(used.inference, used.results(placement))
    evaluation = used.kind.evaluation(found.arrays, source, classes)
    result = _record(options, used, found, evaluation, checked.text)
    if options.data is None and checked.same_data:
        result["beside_run"] = beside_run(run, found.metrics)
    if options.json is not None:
        write_json(result, options.json)
    about = f"{run.weights.origin} on {result['data'] or 'the built-in data'}"
    page = _keep(run.folder, result, worst_sheet(used, found.arrays, evaluation.worst, [about]))
    _print(result, used.kind.noun)
    if page is not None:
        print(page)


def _record(
    options: Evaluate, used: "Session", found: "Joined", evaluation: "Evaluation", checked: str
) -> dict[str, Any]:
    """Return the content of evaluation.json."""
    result: dict[str, Any] = {
        "run": str(used.run.folder),
        "weights": used.run.weights.origin,
        "checked": checked,
        "time": round(time.time(), 3),
        "data": options.data or getattr(used.run.config, "val_data", None) or used.run.config.data,
        "samples": len(found.arrays["ids"]),
        "samples_per_second": found.samples_per_second,
        "metrics": {**found.metrics, **evaluation.metrics, **found.metrics},  # the job's are first, and count
        "classes": [dict(row) for row in evaluation.classes],
        "worst": [asdict(each) for each in evaluation.worst],
        "broken": [{"id": id, "path": path, "reason": why} for id, (path, why) in sorted(found.broken.items())],
    }
    if (confusion := evaluation.confusion) is not None:
        wrong = confusion.copy()
        wrong[range(len(wrong)), range(len(wrong))] = 0
        pairs = sorted(zip(*wrong.nonzero(), strict=True), key=lambda pair: (-wrong[pair], pair))[:CONFUSIONS]
        result["confusions"] = [
            {"class": used.classes[row], "predicted": used.classes[column], "samples": int(wrong[row, column])}
            for row, column in pairs
        ]
        if len(confusion) <= CONFUSIONS:
            result["confusion"] = confusion.tolist()
    return result


def _print(result: Mapping[str, Any], noun: str) -> None:
    rate = f"{rate_text(result['samples_per_second'])} {noun}s/s"
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
        print(f"left out {broken['path']}: {broken['reason']}")


def _keep(folder: "RunFolder", result: Mapping[str, Any], worst: bytes | None) -> str | None:
    """Write the result into the run's folder, and the run's report again; return its path, or None if it cannot be."""
    from raydali.data.sources.storage import reason
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
