"""`raydali predict`: what the model of a run says of other samples.

    raydali predict ~/raydali-runs/pets ~/photos -o predictions.csv
    raydali predict ~/raydali-runs/shapes ~/photos -o boxes.json
    raydali predict ~/raydali-runs/deblur ~/photos -o restored

Each sample comes once, on any number of workers, in the order of its listing. The same command goes on after an
interruption.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from raydali.errors import CommandError, UsageError
from raydali.inference.options import InferenceOptions
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
    placement = options.launch

    from raydali.inference import workers
    from raydali.inference.engine import checked_inference
    from raydali.inference.predictions import Predictions
    from raydali.inference.trained_run import open_run

    run = open_run(run_and_job, options.checkpoint)
    kind = run.predicting
    if options.overlays:
        if run.job.task != "segmentation" or run.job.predictions is None:
            raise UsageError("--overlays suits only jobs that predict masks: leave it out")
        from raydali.inference.task_results.segmentation import Overlays

        kind = Overlays(run.job, run.config, run.pipeline, run.job.predictions)
    if output.suffix.lower() not in kind.endings:
        wanted = " or ".join(ending or "a folder" for ending in kind.endings)
        raise UsageError(f"--output {options.output} does not suit this job, which writes {wanted}: give another one")
    classes = run.labeled_samples(None, {})[1] if run.classes is None else run.classes
    source = kind.open_unlabeled(options.data, options.root, classes)
    inference, checked = checked_inference(run, kind, source, classes, options)
    print(checked.text)
    predictions = Predictions(output, _identity(run, inference))
    parts, missing = inference.parts, predictions.missing(inference.parts)
    if len(missing) < len(parts):
        print(f"{len(parts) - len(missing)} of {plural(len(parts), 'part')} are done already")
    seconds, done, precision = 0.0, 0, ""
    with ThreadPoolExecutor(1) as writer:  # the device goes on meanwhile
        writing = writer.submit(lambda: None)
        for result in workers.results(inference, missing, placement):
            writing.result()
            writing = writer.submit(predictions.write_part, result, kind, source, classes)
            seconds, done = max(seconds, result.seconds), done + len(result.part.ids) - len(result.broken)
            precision = result.precision
        writing.result()
    ids = run.facts.get("category_ids", range(1, len(classes) + 1))  # in COCO's annotations, if the run knows them
    rows, broken = predictions.join(parts, dict(zip(classes, ids, strict=True)))
    rate = f", {rate_text(done / seconds)} {kind.noun}s/s in {precision}" if done else ""
    print(f"{options.output}: {plural(rows, 'row')} of {plural(len(source), kind.noun)}{rate}")
    if broken:
        raise CommandError(
            f"{plural(len(broken), kind.noun)} cannot be read, see {options.output}.broken.csv: "
            f"{summarize(path for path, _ in broken)}"
        )


def _identity(run: "TrainedRun", inference: "Inference") -> dict[str, Any]:
    """Return what the predictions depend on."""
    from raydali.run.data_contents import contents_digest

    source = inference.source
    return {
        "run": str(run.folder),
        "weights": run.weights.sha256,
        "samples": [str(source), len(source), source.fingerprint, contents_digest(source)],
        "batch size": inference.batch_size,
        "precision": inference.precision,
        "settings": f"{type(inference.kind).__name__} {inference.kind.pipeline!r}",
    }
