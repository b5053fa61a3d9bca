"""Find the kind of prediction of a job by the pipeline of its validation samples."""

from typing import Any

from raydali.data.tasks import classification, detection, restoration, video
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import UsageError
from raydali.inference.kinds.kind import Kind


def find_kind(pipeline: Pipeline[Any], config: Any, run: str) -> Kind:
    """Return the kind of prediction.

    Args:
        pipeline: of validation samples.
        config: the options of the job.
        run: the run, for messages.

    Raises:
        UsageError: there is none for this pipeline.
    """
    match pipeline:
        case classification.Images() if getattr(config, "multi_label", False):
            from raydali.inference.kinds.multi_label import MultiLabel

            return MultiLabel()
        case classification.Images():
            from raydali.inference.kinds.classification import Classification

            return Classification()
        case detection.Images():
            from raydali.inference.kinds.detection import Detection

            return Detection()
        case restoration.Pairs():
            from raydali.inference.kinds.restoration import Restoration

            return Restoration()
        case video.Clips():
            from raydali.inference.kinds.video import Video

            return Video()
    raise UsageError(
        f"{run} has a pipeline of its own, {type(pipeline).__name__}: derive it from a pipeline of raydali/data/tasks"
    )
