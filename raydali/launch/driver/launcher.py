"""Launch a job: begin or resume its run, on a cluster or on a Ray of our own."""

import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.source import Source
from raydali.errors import StartError, UsageError
from raydali.host import start_clock
from raydali.host.interrupts import Interrupt
from raydali.launch.choices import (
    OF_EARLIER_VERSIONS,
    OF_SHUFFLING,
    crop_warning,
    with_kept,
    with_loader,
    with_micro_batch,
    with_window,
)
from raydali.launch.driver.loop import Run, train_in_workers
from raydali.launch.driver.option_checks import check, warnings_of
from raydali.launch.driver.placement import resolve_placement
from raydali.launch.driver.ray_cluster import connect
from raydali.launch.driver.resume import PreviousRun, changes, check_unchanged, describe_changes, previous_run
from raydali.launch.driver.starting_weights import (
    SHA256,
    check_freeze,
    check_imports,
    fine_tuning_line,
    match_starting_weights,
    model_facts,
    read_starting_weights,
)
from raydali.launch.options import PLACEMENT_OPTIONS, LaunchOptions
from raydali.launch.row_group_choice import with_row_groups
from raydali.report.console import Console
from raydali.report.recipes import recipe_lines
from raydali.report.tracking import tracked
from raydali.run.attempt import Attempt
from raydali.run.events import SettingsChanged
from raydali.run.folder import CONFIG, EVENTS, RunFolder
from raydali.run.model_file import write_model
from raydali.text import plural

if TYPE_CHECKING:
    from torch import nn

    from raydali.train.weights.matching import MatchedWeights

STREAM_SETTINGS = (
    "fingerprint",
    "epochs",
    "batch_size",
    "global_batch_size",
    "seed",
    *OF_SHUFFLING,
    "repeats",
    SHA256,
)
"""Settings that a resume must repeat, since the stream depends on them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training function with its data, ready to launch.

    Attributes:
        name: the prefix of the names of its runs.
        train: the training function, called as `train(options, data, session)` in every worker.
        data: passed to every worker through Ray's object store, so that the workers of a node share one copy.
        source: the training set.
        labels: of the training set, int64 (N,), if each sample has one: a run in blocks mixes them.
        unchangeable: options that a resume must repeat, besides the stream's, since the weights depend on them.
        classes: their names in order, if the model has an output for each.
        first_label: the label of the first class: 1 for a detector, whose 0 is the background.
        category_ids: the ids of the classes in the annotations, if they have any.
        build_model: builds the model of some options with a number of classes, for `--weights`.
        check: refuses options that do not fit together; they have their final values.
    """

    name: str
    train: Callable[..., None]
    data: Any
    source: Source
    labels: NDArray[np.int64] | None = None
    unchangeable: Sequence[str] = ()
    classes: Sequence[str] = ()
    first_label: int = 0
    category_ids: Sequence[int] = ()
    build_model: "Callable[[Any, int], nn.Module] | None" = None
    check: Callable[[Any], None] | None = None

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return len(self.source)

    @property
    def labeled_classes(self) -> list[tuple[str, int]]:
        """The classes in order, each with its label."""
        return [*zip(self.classes, count(self.first_label), strict=False)]


def launch(job: Job, options: LaunchOptions, console: Console) -> None:
    """Train with these options: begin the run of that name, or resume it.

    Raises:
        UsageError: the options cannot be used, or differ from those of the earlier run of that name.
        StartError: Ray did not start on this machine.
        TrainingError: workers failed more often than `max_failures`, or in a way that would recur.
        KeyboardInterrupt: it was interrupted; a run that was training has left a checkpoint.
    """
    start_clock.mark("index")
    options = with_loader(options, console.print)
    folder = RunFolder(options.storage, options.name or _new_name(job), console.warn)
    options = replace(options, name=folder.name, storage=folder.uri_of_storage)
    earlier = previous_run(folder, _defaults(options) | OF_EARLIER_VERSIONS | getattr(options, "usual_inputs", {}))
    changed: dict[str, tuple[Any, Any]] = {}
    sha256, weights = read_starting_weights(options, folder, earlier)
    of_weights = asdict(weights.preprocessing) if weights is not None else None
    kept = earlier.settings if earlier is not None else {}
    options = with_kept(options, kept, of_weights)
    if earlier is not None:
        size = options.global_batch_size or earlier.settings["global_batch_size"]
        options = with_micro_batch(replace(options, global_batch_size=size), kept)
        settings = _settings(job, options, sha256)
        check_unchanged(folder, earlier, settings, (*STREAM_SETTINGS, *job.unchangeable))
        if earlier.finished:
            console.print(f"{folder} is finished: give another --name to train again")
            return
        changed = changes(earlier, settings, sorted(settings.keys() - PLACEMENT_OPTIONS))
        for change in describe_changes(changed):
            console.warn(f"the run resumes with a changed setting: {change}")
    check(with_micro_batch(options, kept), job.samples)
    if job.check is not None:
        job.check(options)
    matched = None
    if job.build_model is not None:
        build = partial(job.build_model, options)
        check_freeze(options, build, job.classes)
        matched = match_starting_weights(weights, build, job.classes) if weights is not None else None
    if warning := crop_warning(options):
        console.warn(warning)
    with _created(folder), connect(options, console.warn) as cluster:
        start_clock.mark("cluster")
        placement = resolve_placement(options, cluster)
        if options.global_batch_size is None:
            options = replace(options, global_batch_size=options.batch_size * placement.maximum)
        options = with_micro_batch(options, kept, placement.maximum)
        check(options, job.samples, placement)
        options = with_row_groups(
            options,
            job.source,
            job.labels,
            workers=(placement.minimum, placement.maximum),
            cpus=placement.cpus,
            tell=console.print,
            warn=console.warn,
        )
        options = with_window(options, job.samples, job.labels)
        for warning in warnings_of(options, placement, cluster, job.samples, job.labels):
            console.warn(warning)
        check_imports(options, console.warn)
        settings = _settings(job, options, sha256)
        attempt = Attempt()
        folder = _begin(folder, attempt, earlier, settings, changed)
        write_model(folder, _model_facts(job, settings, matched))
        run = Run(
            train=job.train,
            data=job.data,
            samples=job.samples,
            weights=matched,
            options=options,
            placement=placement,
            cluster=cluster,
            folder=folder,
            attempt=attempt.driver,
            stale_run_ids=earlier.train_runs if earlier is not None else frozenset(),
        )
        interrupt = Interrupt()
        with interrupt.on_signals(), tracked(folder, options.trackers, settings, console.warn) as track:
            console.print(f"run {folder}: the same command with --name {folder.name} resumes it")
            if matched is not None:
                for line in (*matched.describe(), fine_tuning_line(settings)):
                    console.print(line)
            for line in recipe_lines(settings):
                console.print(line)
            spares = f" and {plural(placement.spares, 'spare')}" if placement.spares else ""
            console.print(f"starting {plural(placement.reachable, 'worker')}{spares} of {placement}")
            train_in_workers(run, console, track, interrupt)


def _new_name(job: Job) -> str:
    """Return a name with random characters, since two runs may begin in the same second."""
    return time.strftime(f"{job.name}-%Y%m%d-%H%M%S-") + "".join(
        random.choices(string.ascii_lowercase + string.digits, k=4)
    )


def _defaults(options: LaunchOptions) -> dict[str, Any]:
    """Return the defaults of all options that have one."""
    return {each.name: each.default for each in fields(options) if each.default is not MISSING}


def _begin(
    folder: RunFolder,
    attempt: Attempt,
    earlier: PreviousRun | None,
    settings: dict[str, Any],
    changed: dict[str, tuple[Any, Any]],
) -> RunFolder:
    """Take over the run's folder for this driver, and bring `config.json` up to date.

    Raises:
        UsageError: another driver began a run of this name at the same moment.
    """
    if earlier is None:
        try:
            folder.create_json(CONFIG, settings)
        except FileExistsError as error:
            raise UsageError(
                f"another driver has just begun the run {folder}: give another --name, or let that driver train it"
            ) from error
    attempt.take(folder)
    folder = attempt.fenced(folder)
    folder.remove_partial_files()
    if changed:
        folder.append(EVENTS, {"time": round(time.time(), 3), **SettingsChanged(changed=changed).row()})
    if earlier is not None and changes(earlier, settings, settings):
        folder.write_json(CONFIG, settings)
    return folder


@contextmanager
def _created(folder: RunFolder) -> Iterator[None]:
    """Create the run's folder; remove it if the start is refused or interrupted while it is empty."""
    folder.create()
    try:
        yield
    except (UsageError, StartError, KeyboardInterrupt):
        folder.remove_if_empty()
        raise


def _model_facts(job: Job, settings: dict[str, Any], matched: "MatchedWeights | None") -> dict[str, Any]:
    facts = model_facts(job.train.__code__.co_filename, job.labeled_classes, settings, matched)
    return facts | ({"category_ids": [*job.category_ids]} if job.category_ids else {})


def _settings(job: Job, options: LaunchOptions, sha256: str | None) -> dict[str, Any]:
    return asdict(options) | {"samples": job.samples, "fingerprint": job.source.fingerprint, SHA256: sha256}
