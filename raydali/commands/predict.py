"""`raydali predict`: what the model of a run says of other samples.

    raydali predict ~/raydali-runs/pets ~/photos -o predictions.csv
    raydali predict ~/raydali-runs/shapes ~/photos -o boxes.json
    raydali predict ~/raydali-runs/deblur ~/photos -o restored

Each sample comes once, on any number of workers, in the order of its listing. The same command goes on after an
interruption.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from raydali.errors import CommandError, UsageError
from raydali.options.inference import InferenceOptions
from raydali.output import require_there, require_writable
from raydali.text import plural, rate_text, summarize

TO_ADD = (
    "add `def predictions(config, outputs, paths)`, which returns values by column or contents by file, and "
    "Job(predictions=predictions): see docs/own-data.md"
)

if TYPE_CHECKING:
    from raydali.inference.engine import Inference
    from raydali.inference.trained_run import TrainedRun


@dataclass(frozen=True, kw_only=True)
class Predict(InferenceOptions):
    """Predict labels of images or videos, boxes in images, or restored images."""

    data: tyro.conf.Positional[str]
    """Folder or URI (s3://, gs://) with samples at any depth, a list with a path in each line, or shards."""
    output: Annotated[str, tyro.conf.arg(aliases=["-o"])]
    """File that ends in .csv or .parquet, for boxes also in .json, as COCO has results; for restored images a
    folder."""
    root: str | None = None
    """Folder or URI that relative paths in a list start from. Default: the list's folder."""
    overlays: bool = False
    """With each predicted mask, also write NAME.overlay.jpg: the image in the colours of its classes."""


def main(options: Predict) -> None:
    """Compute the predictions of all samples, and write them.

    Raises:
        UsageError: the run or the data cannot be used, or the output exists.
        DataError, StorageAway, CommandError: samples cannot be read, workers failed, or the disk is full.
    """
    # All that needs no PyTorch, whose import takes seconds.
    from raydali.inference.job_module import found_run

    run_and_job = found_run(options.run, options.job)
    if run_and_job.job.task is None and run_and_job.job.predictions is None:
        raise UsageError(f"{run_and_job.file} does not say what to predict: {TO_ADD}")
    require_there("the path", options.data)
    output = Path(options.output).expanduser().absolute()
    require_writable("--output", str(output) if output.suffix else f"{output}.parts")

    from raydali.inference import workers
    from raydali.inference.engine import checked_inference
    from raydali.inference.predictions import Predictions
    from raydali.inference.samples import unlabeled_samples
    from raydali.inference.task_results.task_results import predictions_class
    from raydali.inference.trained_run import open_run

    run = open_run(run_and_job, options.checkpoint)
    wanted = predictions_class(run)
    if options.overlays:
        if run.job.task != "segmentation" or run.job.predictions is None:
            raise UsageError("--overlays suits only jobs that predict masks: leave it out")
        from raydali.inference.task_results.segmentation import Overlays

        wanted = Overlays
    if output.suffix.lower() not in wanted.endings:
        forms = " or ".join(ending or "a folder" for ending in wanted.endings)
        raise UsageError(f"--output {options.output} does not suit this job, which writes {forms}: give another one")
    task_results = wanted(run, *unlabeled_samples(run, options.data, options.root))
    inference, checked = checked_inference(run, task_results, options)
    print(checked.text)
    predictions = Predictions(output, _identity(run, inference))
    parts, missing = inference.parts, predictions.missing(inference.parts)
    if len(missing) < len(parts):
        print(f"{len(parts) - len(missing)} of {plural(len(parts), 'part')} are done already")
    seconds, done, precision = 0.0, 0, ""
    # The device goes on while a part is written.
    with ThreadPoolExecutor(1) as writer, closing(workers.results(inference, missing, options)) as results:
        writing = writer.submit(lambda: None)
        for result in results:
            writing.result()
            writing = writer.submit(predictions.write_part, result, task_results)
            seconds, done = max(seconds, result.seconds), done + len(result.part.ids) - len(result.broken)
            precision = result.precision
        writing.result()
    classes, noun = task_results.classes, task_results.noun
    ids = run.facts.get("category_ids", range(1, len(classes) + 1))  # in COCO's annotations, if the run knows them
    rows, broken = predictions.join(parts, dict(zip(classes, ids, strict=True)))
    rate = f", {rate_text(done / seconds)} {noun}s/s in {precision}" if done else ""
    print(f"{options.output}: {plural(rows, 'row')} of {plural(len(task_results.source), noun)}{rate}")
    if broken:
        raise CommandError(
            f"{plural(len(broken), noun)} cannot be read, see {options.output}.broken.csv: "
            f"{summarize(path for path, _ in broken)}"
        )


def _identity(run: "TrainedRun", inference: "Inference") -> dict[str, Any]:
    """Return what the predictions depend on."""
    from raydali.run.data_contents import contents_digest

    task_results, source = inference.task_results, inference.task_results.source
    return {
        "run": str(run.folder),
        "weights": run.weights.sha256,
        "samples": [str(source), len(source), source.fingerprint, contents_digest(source)],
        "batch size": inference.batch_size,
        "precision": inference.precision,
        "settings": f"{type(task_results).__name__} {task_results.pipeline!r}",
    }
