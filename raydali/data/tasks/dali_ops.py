"""Common parts of DALI graphs: reading files and their shapes, external inputs, decoders.

Inputs on the host are passed without a copy: DALI keeps references to them until it has used them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import nvidia.dali as dali
import torch
from nvidia.dali import fn

from raydali.data.tasks.pipeline import Device, Interpolation

Feed = Callable[[], tuple[Any, ...]]
"""A callback that returns the inputs of the next batch."""
FILTERS: dict[Interpolation, Any] = {"bilinear": dali.types.INTERP_LINEAR, "bicubic": dali.types.INTERP_CUBIC}
"""DALI's filters for resizing."""


def reading_graph(feed: Feed, files: int, *, reads: bool) -> tuple[Any, ...]:
    """Build the nodes that read the files of each sample.

    Args:
        feed: returns the paths or the contents of a batch.
        files: number of files per sample.
        reads: if True, DALI reads the paths that `feed` returns; if False, `feed` returns contents.
    """
    nodes = fn.external_source(feed, num_outputs=files, batch=True, no_copy=True)
    return tuple(fn.io.file.read(node, dont_use_mmap=True) if reads else node for node in nodes)


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


def decoder_options(device: Device, hw_decoder_load: float, largest_image: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Return keyword arguments of DALI's image decoders; see `settings.DecoderSettings` for the last two arguments."""
    if device == "cpu":
        return {"device": "cpu"}
    return {
        "device": "mixed",
        "hw_decoder_load": hw_decoder_load,
        "preallocate_height_hint": largest_image[0],
        "preallocate_width_hint": largest_image[1],
    }


@contextmanager
def conditionals_hint() -> Iterator[None]:
    """Add the name of raydali's setting to DALI's error about an `if` in a graph."""
    try:
        yield
    except TypeError as error:
        if "enable_conditionals" in str(error):
            error.add_note("in raydali: `conditionals = True` in the pipeline's class, see docs/own-data.md")
        raise
