"""One use of a trained run: its model, some samples, and the results for all of them."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from raydali.data.loading.quarantine import none_read
from raydali.data.sources.formats import check_column_options
from raydali.data.sources.source import Source, classes_of
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import UsageError
from raydali.extras import default_loader
from raydali.host.cpu_times import usable_cores
from raydali.inference import workers
from raydali.inference.engine import Inference, PartResult
from raydali.inference.kinds.kind import Arrays, Columns, Kind
from raydali.inference.options import InferenceOptions
from raydali.inference.parts import Part, cut
from raydali.inference.trained_run import TrainedRun
from raydali.launch.options import LaunchOptions
from raydali.text import plural, rate_text

LINE_SECONDS = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Session:
    """A model with samples.

    Attributes:
        run: the trained run.
        kind: what its model predicts.
        source: the samples.
        classes: in the order of the model's outputs; none if it has no output for each.
        inference: what workers compute.
        parts: all parts of the source.
    """

    run: TrainedRun
    kind: Kind
    source: Source
    classes: tuple[str, ...]
    inference: Inference
    parts: Sequence[Part]

    def results(self, options: LaunchOptions, parts: Sequence[Part] | None = None) -> Iterator[PartResult]:
        """Yield the results of some parts, by default of all, in any order; shows the progress of slow ones.

        Raises:
            UsageError, CommandError, DataError, StorageAway: see `workers.results`.
        """
        parts = self.parts if parts is None else parts
        done, total, told = 0, sum(len(part.ids) for part in parts), time.monotonic()
        for result in workers.results(self.inference, parts, options):
            done += len(result.part.ids)
            if time.monotonic() - told >= LINE_SECONDS:
                told = time.monotonic()
                rate = rate_text(done / max(result.seconds, 1e-9))
                print(f"{done:,} of {plural(total, self.kind.noun)}, {rate}/s", file=sys.stderr)
            yield result


def validation_samples(run: TrainedRun) -> tuple[Source, tuple[str, ...]]:
    """Return the validation samples of a run, as its job opens them, and its classes.

    Raises:
        UsageError: they cannot be opened, or their classes have changed.
    """
    data = run.data
    classes = classes_of(data.train)
    if run.classes is not None and tuple(run.classes) != classes:
        raise UsageError(f"the classes of {data.train} are not those of the run {run.folder} any more: give --data")
    if run.fingerprint not in (None, data.train.fingerprint):
        _log.warning("%s is not what %s was trained on, so it may have seen validation samples", data.train, run.folder)
    return data.val, classes


def labeled_samples(run: TrainedRun, data: str, given: Columns) -> tuple[Source, tuple[str, ...]]:
    """Return other samples with their truth, and the classes of the run.

    Args:
        run: the trained run.
        data: what the user gives.
        given: what the user gives for lists.

    Raises:
        UsageError: they cannot be opened, or have classes that the run lacks.
    """
    check_column_options(data, root=given["root"], label_column=given["label_column"])
    source = run.kind.open_labeled(data, run.reading, run.classes, given)
    return source, classes_of(source) if run.classes is None else run.classes


def session(
    run: TrainedRun,
    source: Source,
    classes: tuple[str, ...],
    options: InferenceOptions,
    *,
    kind: Kind | None = None,
    pipeline: Pipeline[Any] | None = None,
    batch_size: int | None = None,
    evaluates: bool = False,
) -> Session:
    """Build the model of a run for some samples.

    Args:
        run: the trained run.
        source: the samples.
        classes: in the order of the model's outputs.
        options: how the model runs.
        kind: in place of that of the run.
        pipeline: in place of that of the run.
        batch_size: in place of that of the run.
        evaluates: whether the job's evaluation is computed.

    Raises:
        UsageError: the weights do not fit the model.
    """
    # In a container, PyTorch would start a thread for each core of the machine.
    torch.set_num_threads(min(torch.get_num_threads(), options.cpus_per_worker or usable_cores()))
    kind = kind or run.kind
    size = batch_size or options.batch_size or run.config.batch_size
    inference = Inference(
        kind=kind,
        network=run.network(len(classes)),
        evaluate=partial(run.job.evaluate, run.config) if evaluates else None,
        pipeline=pipeline or run.pipeline,
        source=source,
        batch_size=size,
        precision=run.config.precision,
        loader=partial(run.make_loader, options.loader or default_loader()),
    )
    parts = cut(len(source), size, kind.edges(source))
    return Session(run=run, kind=kind, source=source, classes=classes, inference=inference, parts=parts)


@dataclass(frozen=True)
class Joined:
    """The results of all parts.

    Attributes:
        arrays: in the order of ids, see `Kind.outputs`.
        broken: path and reason of the samples that could not be read, by id.
        metrics: of the job's evaluation, if it was computed.
        samples_per_second: over all workers, whose start counts too.
    """

    arrays: Arrays
    broken: dict[int, tuple[str, str]]
    metrics: dict[str, Any]
    samples_per_second: float


def joined(inference: Inference, results: Iterable[PartResult]) -> Joined:
    """Join the results of all parts.

    Raises:
        DataError: no sample could be read.
    """
    ordered = sorted(results, key=lambda result: result.part.number)
    read = [result.arrays for result in ordered if result.arrays]
    broken = {id: why for result in ordered for id, why in result.broken.items()}
    if not read:
        raise none_read(f"{path}: {reason}" for path, reason in broken.values())
    arrays = {name: np.concatenate([each[name] for each in read]) for name in read[0]}
    metrics = inference.metrics(ordered) if inference.evaluate is not None else {}
    return Joined(arrays, broken, metrics, len(arrays["ids"]) / max(result.seconds for result in ordered))
