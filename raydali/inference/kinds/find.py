"""Find the kind of prediction of a job by its task."""

from typing import Any

from raydali.inference.kinds.kind import Kind
from raydali.launch.job import Job


def find_kind(job: Job[Any], config: Any) -> Kind:
    """Return the kind of prediction of a job with these options."""
    if job.task is None:
        from raydali.inference.kinds.own import OwnTask

        return OwnTask(job, config)
    if job.task == "classification":
        from raydali.inference.kinds.classification import Classification
        from raydali.inference.kinds.multi_label import MultiLabel

        return MultiLabel() if getattr(config, "multi_label", False) else Classification()
    if job.task == "detection":
        from raydali.inference.kinds.detection import Detection

        return Detection()
    if job.task == "restoration":
        from raydali.inference.kinds.restoration import Restoration

        return Restoration()
    from raydali.inference.kinds.video import Video

    return Video()
