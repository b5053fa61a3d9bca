"""Defines jobs: a file says once, for training and for every command, what the data, network and evaluation are.

    options --> open_data --> train, in every worker: the run
                    |            | build_model, network, the pipelines, evaluate
                    +------------+--> the same functions, with trained weights: evaluate, predict, export, preview

A job's file has a `Job` named JOB at its top level. Commands load the file as a module, and take all from there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from raydali.data.index.source import TrainAndVal
from raydali.data.tasks.pipeline import Pipeline
from raydali.host import start_clock
from raydali.options.every_job import TrainingOptions
from raydali.text import plural

if TYPE_CHECKING:
    import ray
    from torch import nn

    from raydali.launch.channel import DriverChannel
    from raydali.run.folder import RunFolder
    from raydali.training.weights.matching import MatchedWeights

Config = TypeVar("Config", bound=TrainingOptions)
Task = Literal["classification", "detection", "restoration", "segmentation", "video"]


def describe_sizes(_: TrainingOptions, data: TrainAndVal[Any]) -> str:
    """Return the sizes of both sets, for the console."""
    return f"{plural(len(data.train), 'training sample')}, {plural(len(data.val), 'validation sample')}"


@dataclass(frozen=True, kw_only=True)
class Job(Generic[Config]):
    """The functions of a job. Each is called with the job's options, which have their final values then.

    Attributes:
        name: the prefix of the names of its runs.
        config: the class of its options, which the command line is parsed to.
        open_data: opens the training and the validation set, without what is excluded. The driver calls it, and passes
            the result to every worker through Ray's object store, so that the workers of a node share one copy.
        build_model: builds the model for a number of classes, with random weights.
        network: returns what is trained and validated: it takes the loader's tensor, and contains the model, its
            normalisation, and test-time augmentation. If its outputs depend on thresholds or a selection, it has a
            method `raw_outputs`, which returns the tensors before these, for the same inputs.
        train_pipeline, val_pipeline: make the pipelines of training and of validation samples.
        evaluate: called as `evaluate(config, network, val)`, returns the figures of a network by name; `val` is the
            `ValidationPass` that `run.validation()` yields.
        train: the training function, called as `train(config, data, session)` in every worker.
        task: what raydali adds: figures of each class, the worst samples, other data, and predictions. None: nothing.
        predictions: called as `predictions(config, outputs, paths)` with the outputs for samples, and their paths,
            returns what `raydali predict` writes of them: values by the name of a column, or contents by the path of a
            file. None: the task's.
        loader: returns the function that makes loaders; None: `make_loader`.
        check: refuses options that do not fit together.
        unchangeable: returns the options that a resume must repeat, besides the stream's: the weights depend on them.
        describe: describes the data for the console.
        demo: the options without `--data`, for a job with built-in data.
        about_demo: what the console says of them.
        fine_tuning: the options with `--weights`; with it, the job starts from weights of `--weights`.
    """

    name: str
    config: type[Config]
    open_data: Callable[[Config], TrainAndVal[Any]]
    build_model: "Callable[[Config, int], nn.Module]"
    network: "Callable[[nn.Module, Config], nn.Module]"
    train_pipeline: Callable[[Config], Pipeline[Any]]
    val_pipeline: Callable[[Config], Pipeline[Any]]
    evaluate: Callable[..., Mapping[str, Any]]
    train: Callable[..., None]
    task: Task | None = None
    predictions: Callable[..., Mapping[str, Any]] | None = None
    loader: Callable[[Config], Callable[..., Any]] | None = None
    check: Callable[[Config], None] = lambda _: None
    unchangeable: Callable[[Config], Sequence[str]] = lambda _: ()
    describe: Callable[[Config, TrainAndVal[Any]], str] = describe_sizes
    demo: Config | None = None
    about_demo: str = "this is the demo, on built-in data; --data DIR trains on your own"
    fine_tuning: Config | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """Every worker gets this object from the driver.

    Attributes:
        train, samples: see Job.
        data: the job's data, in Ray's object store.
        weights: what the model of a fresh run starts from, there too; None for random weights.
        attempt: the id of the driver's attempt.
        marks: the phases of the driver's start.
        short_seconds: see Session.
    """

    train: Callable[..., None]
    data: "ray.ObjectRef[Any]"
    samples: int
    weights: "ray.ObjectRef[MatchedWeights | None]"
    options: TrainingOptions
    folder: "RunFolder"
    attempt: str
    marks: list[start_clock.Mark]
    channel: "DriverChannel"
    short_seconds: float | None = None
