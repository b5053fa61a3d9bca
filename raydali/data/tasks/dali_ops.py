"""Common parts of DALI graphs: external inputs, and Python functions of raydali's own.

Inputs on the host are passed without a copy: DALI keeps references to them until it has used them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import nvidia.dali as dali
import torch
from numpy.typing import NDArray
from nvidia.dali import fn
from nvidia.dali.pipeline import do_not_convert

from raydali.data.tasks.crops import on_threads
from raydali.data.tasks.pipeline import Interpolation

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode

Feed = Callable[[], tuple[Any, ...]]
"""A callback that returns the inputs of the next batch."""
FILTERS: dict[Interpolation, Any] = {"bilinear": dali.types.INTERP_LINEAR, "bicubic": dali.types.INTERP_CUBIC}
"""DALI's filters for resizing."""


def external_inputs(feed: Feed, num_inputs: int, *, gpu_inputs: int, device: torch.device) -> list[Any]:
    """Return the nodes of the inputs that `feed` returns for each batch; the first `gpu_inputs` are on the GPU."""
    if not gpu_inputs:
        return list(fn.external_source(feed, num_outputs=num_inputs, batch=True, no_copy=True))
    queues: tuple[deque[Any], deque[Any]] = deque(), deque()

    def part(index: int) -> tuple[Any, ...]:
        if not queues[index]:
            whole = feed()
            for tensor in chain.from_iterable(whole[:gpu_inputs]):
                tensor.record_stream(stream)  # keep its memory until DALI's copy has run, even if it is deleted
            queues[0].append(whole[:gpu_inputs])
            queues[1].append(whole[gpu_inputs:])
        inputs: tuple[Any, ...] = queues[index].popleft()
        return inputs

    # A separate stream: on torch's, DALI's copies would wait for the training steps in its queue.
    stream = torch.cuda.Stream(device)
    on_gpu = fn.external_source(
        lambda: part(0), num_outputs=gpu_inputs, batch=True, device="gpu", cuda_stream=stream.cuda_stream
    )
    return [
        *on_gpu,
        *fn.external_source(lambda: part(1), num_outputs=num_inputs - gpu_inputs, batch=True, no_copy=True),
    ]


@contextmanager
def conditionals_hint() -> Iterator[None]:
    """Add the name of raydali's setting to DALI's error about an `if` in a graph."""
    try:
        yield
    except TypeError as error:
        if "enable_conditionals" in str(error):
            error.add_note("in raydali: `conditionals = True` in the pipeline's class, see docs/own-data.md")
        raise


@do_not_convert  # type: ignore[untyped-decorator]
def each_image(function: Callable[..., NDArray[np.uint8]], images: "DataNode", *others: "DataNode") -> "DataNode":
    """Return a DALI node of function(image, *others) of each sample, on as many threads as torch has."""
    whole_batch = on_threads(function)
    return fn.python_function(images, *others, function=whole_batch, batch_processing=True, output_layouts="HWC")


def shut_down(pipeline: dali.Pipeline) -> None:
    """End the threads of a pipeline and free its memory, now: its graph is a cycle of references, freed much later."""
    pipeline._shutdown()  # DALI has no public name for it
