"""Launch a job: begin or resume its run, on a cluster or on a Ray of our own."""

import random
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from raydali.data.index.source import Source, TrainAndVal, classes_of
from raydali.data.index.validation_set import warn_of_overlap
from raydali.errors import StartError, UsageError
from raydali.host import start_clock
from raydali.host.interrupts import Interrupt
from raydali.launch.driver.option_checks import (
    check,
    check_class_sampling,
    check_loader,
    crop_warning,
    tell_amplification,
    warnings_of,
)
from raydali.launch.driver.placement import resolve_placement
from raydali.launch.driver.ray_cluster import connect
from raydali.launch.driver.resume import PreviousRun, changes, check_unchanged, describe_changes, previous_run
from raydali.launch.driver.starting_weights import (
    SHA256,
    check_freeze,
    check_imports,
    check_one_sample,
    fine_tuning_line,
    model_facts,
    read_starting_weights,
)
from raydali.launch.job import Job
from raydali.options.defaults import SHUFFLE_OPTIONS, Facts, defaults_of, resolve
from raydali.options.every_job import PLACEMENT_OPTIONS, TrainingOptions
from raydali.options.subjects import StartingWeightsOptions
from raydali.report.console import Console
from raydali.report.html.text import recipe_lines
from raydali.report.tracking import tracked
from raydali.run.attempt import Attempt
from raydali.run.data_contents import check_contents, write_contents
from raydali.run.early_end import GO_ON, early_end
from raydali.run.events import SettingsChanged
from raydali.run.folder import CONFIG, EPOCHS, EVENTS, FORM, RunFolder
from raydali.run.model_file import best_metric, write_model
from raydali.text import plural

if TYPE_CHECKING:
    from raydali.training.weights.matching import MatchedWeights

STREAM_SETTINGS = (
    "fingerprint",
    "epochs",
    "global_batch_size",
    "seed",
    *SHUFFLE_OPTIONS,
    "repeats",
    "class_sampling",
    SHA256,
)
"""Settings that a resume must repeat, since the stream depends on them."""


def launch(job: Job[Any], given: TrainingOptions, console: Console, short_seconds: float | None = None) -> None:
    """Train with these options: begin the run of that name, or resume it.

    Args:
        job: the job.
        given: its options, as they were parsed.
        console: shows what happens.
        short_seconds: see `launch.worker.session.Session`.

    Raises:
        UsageError: the options cannot be used, or differ from what the earlier run of that name had.
        StartError: Ray did not start on this machine.
        TrainingError: workers failed more often than `max_failures`, or in a way that would recur.
        KeyboardInterrupt: it was interrupted; a run that was training has left a checkpoint.
    """
    check_loader(given, console.print)
    folder = RunFolder(given.storage, given.name or new_name(job.name), console.warn)
    earlier = previous_run(folder, defaults_of(type(given)))
    data = job.open_data(given)
    train, samples, labels = data.train, len(data.train), getattr(data.train, "one_each", None)
    classes = classes_of(train)
    if job.demo is not None and getattr(given, "data", None) is None:
        console.print(job.about_demo)
    console.print(f"data: {job.describe(given, data)}")
    start_clock.mark("index")
    given = replace(given, name=folder.name, storage=folder.uri_of_storage)
    changed: dict[str, tuple[Any, Any]] = {}
    sha256, weights = read_starting_weights(given, folder, earlier)
    kept = earlier.settings if earlier is not None else {}
    facts = Facts(samples=samples, source=train, labels=labels)
    if weights is not None:
        facts = replace(facts, weights_inputs=asdict(weights.preprocessing))
    options = resolve(given, kept, facts)
    if earlier is not None:
        settings = _settings(options, data, sha256)
        check_unchanged(folder, earlier, settings, (*STREAM_SETTINGS, *job.unchangeable(options)))
        if earlier.finished:
            console.print(f"{folder} is finished: give another --name to train again")
            return
        limits = {"patience": options.patience, "stop_after": options.stop_after}
        if earlier.ended_early and (why := early_end(folder.rows(EPOCHS), best_metric(folder), **limits)):
            console.print(f"{folder} has ended early: {why}; {GO_ON}")
            return
        changed = changes(earlier, settings, sorted(settings.keys() - PLACEMENT_OPTIONS))
        for change in describe_changes(changed):
            console.warn(f"the run resumes with a changed setting: {change}")
    contents = check_contents(folder, train, data.val)
    check(options, samples)
    check_class_sampling(options, train)
    job.check(options)
    warn_of_overlap(train, data.val)
    from raydali.data.tasks.class_check import class_warnings  # not before: it imports Pillow

    for warning in class_warnings(train):
        console.warn(warning)
    build = partial(job.build_model, options)
    check_freeze(options, build, classes)
    check_one_sample(job, options, data)
    matched = None
    if weights is not None and isinstance(options, StartingWeightsOptions):
        from raydali.training.weights.matching import match

        matched = match(weights, build, len(classes), classes, options.new_layers)
    if warning := crop_warning(options):
        console.warn(warning)
    with _created(folder), connect(options, console.warn) as connected:
        start_clock.mark("cluster")
        cluster = connected.look()
        placement = resolve_placement(options, cluster)
        facts = replace(facts, workers=(placement.minimum, placement.maximum), cpus=placement.cpus)
        before, options = options, resolve(given, kept, facts)
        check(options, samples, placement)
        if options.batch_size != before.batch_size:  # a recipe's, for so many workers
            check_one_sample(job, options, data)
        tell_amplification(before, options, facts, console.print, console.warn)
        for warning in warnings_of(options, placement, cluster, samples, labels, own=connected.own):
            console.warn(warning)
        check_imports(options, console.warn)
        settings = _settings(options, data, sha256)
        attempt = Attempt()
        folder = _begin(folder, attempt, earlier, settings, changed)
        write_contents(folder, contents)
        write_model(folder, _model_facts(job, train, settings, matched))
        interrupt = Interrupt()
        with interrupt.on_signals(), tracked(folder, options.trackers, settings, console.warn) as track:
            console.print(f"run {folder}: the same command with --name {folder.name} resumes it")
            if matched is not None:
                for line in (*matched.describe(), fine_tuning_line(settings)):
                    console.print(line)
            for line in recipe_lines(settings):
                console.print(line)
            console.print(f"starting {plural(placement.reachable, 'worker')} of {placement}")
            from raydali.launch.driver.loop import train_in_workers  # not before: they import Ray
            from raydali.launch.driver.worker_group import worker_task

            task = worker_task(job.train, data, matched, options, folder, attempt.driver, short_seconds)
            train_in_workers(task, placement, connected, console, track, interrupt)


def new_name(job: str) -> str:
    """Return a name with random characters, since two runs may begin in the same second."""
    return time.strftime(f"{job}-%Y%m%d-%H%M%S-") + "".join(random.choices(string.ascii_lowercase + string.digits, k=4))


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


def _model_facts(
    job: Job[Any], train: Source, settings: dict[str, Any], matched: "MatchedWeights | None"
) -> dict[str, Any]:
    labels = [*zip(classes_of(train), count(getattr(train, "first_label", 0)), strict=False)]
    facts = model_facts(job.train.__code__.co_filename, labels, settings, matched)
    if (numbers := getattr(train, "one_each", None)) is not None:
        facts["samples_of_classes"] = np.bincount(numbers, minlength=len(labels)).tolist()
    category_ids = getattr(train, "category_ids", None)
    return facts if category_ids is None else facts | {"category_ids": category_ids.tolist()}


def _settings(options: TrainingOptions, data: TrainAndVal[Any], sha256: str | None) -> dict[str, Any]:
    facts = {"form": FORM, "samples": len(data.train), "fingerprint": data.train.fingerprint, SHA256: sha256}
    return asdict(options) | facts
