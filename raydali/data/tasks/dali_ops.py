"""Common parts of DALI graphs: reading files and their shapes, external inputs, decoders."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import nvidia.dali as dali
import torch
from nvidia.dali import fn

from raydali.data.tasks import image_formats
from raydali.data.tasks.pipeline import Device

BatchSource = Callable[[], tuple[Any, ...]]


def reading_graph(feed: BatchSource, files: int, *, reads: bool) -> tuple[Any, ...]:
    """Return the nodes of the files of each sample: contents, then shapes, lengths, first and last bytes.

    Args:
        feed: returns the inputs of a batch.
        files: number of files of a sample.
        reads: whether `feed` returns paths instead of contents.
    """
    nodes = fn.external_source(feed, num_outputs=files, batch=True)
    contents = [fn.io.file.read(node, dont_use_mmap=True) if reads else node for node in nodes]
    lengths = [content.shape(dtype=dali.types.INT32) for content in contents]
    part = partial(fn.slice, axes=[0], out_of_bounds_policy="pad")
    heads = [part(content, start=[0], shape=[image_formats.HEAD]) for content in contents]
    tails = [
        part(content, start=length - image_formats.TAIL, shape=[image_formats.TAIL])
        for content, length in zip(contents, lengths, strict=True)
    ]
    return (*contents, *map(fn.peek_image_shape, contents), *lengths, *heads, *tails)


def external_inputs(feed: BatchSource, fed: int, *, resident: int, device: torch.device) -> list[Any]:
    """Return the nodes of the inputs that `feed` returns for each batch; the first `resident` inputs are on the GPU.

    DALI does not copy inputs on the host, and keeps references to them until it has used them.
    """
    if not resident:
        return list(fn.external_source(feed, num_outputs=fed, batch=True, no_copy=True))
    parts: tuple[deque[Any], deque[Any]] = deque(), deque()

    def of(side: int) -> tuple[Any, ...]:
        if not parts[side]:
            whole = feed()
            for tensor in chain.from_iterable(whole[:resident]):
                tensor.record_stream(stream)  # keep its memory until DALI's copy has run
            parts[0].append(whole[:resident])
            parts[1].append(whole[resident:])
        part: tuple[Any, ...] = parts[side].popleft()
        return part

    # On torch's stream, DALI's copies would wait for the training steps in its queue.
    stream = torch.cuda.Stream(device)
    on_gpu = fn.external_source(
        lambda: of(0), num_outputs=resident, batch=True, device="gpu", cuda_stream=stream.cuda_stream
    )
    return [*on_gpu, *fn.external_source(lambda: of(1), num_outputs=fed - resident, batch=True, no_copy=True)]


def decoder(device: Device, hw_decoder_load: float, largest_image: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Return the options of DALI's image decoders; see `settings.DecoderSettings` for the arguments."""
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
