"""Find the kind of prediction of a job by its task."""

from importlib import import_module
from typing import Any

from raydali.inference.kinds.kind import Kind
from raydali.inference.kinds.own import OwnTask
from raydali.launch.job import Job


def find_kind(job: Job[Any], config: Any) -> Kind:
    """Return the kind of prediction of a job with these options; only its module is imported."""
    if job.task is None:
        return OwnTask(job, config)
    several = job.task == "classification" and getattr(config, "multi_label", False)
    module, name = ("multi_label", "MultiLabel") if several else (job.task, job.task.capitalize())
    kind: Kind = getattr(import_module(f"raydali.inference.kinds.{module}"), name)()
    return kind
