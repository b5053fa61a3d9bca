"""Run a function on nodes of the connected cluster, where some may not answer."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def call_on_nodes(
    function: Callable[..., T], calls: Sequence[tuple[str, tuple[object, ...]]], seconds: float
) -> list[T | Exception]:
    """Call a function on nodes at the same time. It is ended where it takes longer.

    Args:
        function: can be imported on the nodes, or be pickled by value.
        calls: the id of a node, and the arguments there, for each call.
        seconds: the limit for all of them.

    Returns:
        What the function has returned, or why there is no answer, for each call.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(function)
    references = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments)
        for node, arguments in calls
    ]
    ray.wait(references, num_returns=len(references), timeout=seconds)
    answers: list[T | Exception] = []
    for reference in references:
        try:
            answers.append(ray.get(reference, timeout=0))
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
            ray.cancel(reference, force=True)
            answers.append(error)
    return answers
