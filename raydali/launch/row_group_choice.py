"""Chooses blocks for data whose samples are read with their neighbours: Parquet files, which are read by row groups.

A full shuffle reads a row group for each sample. In blocks of some row groups each of these is read about once, if
the blocks of a window mix the classes and fit into the memory that a process keeps for them.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.source import Source
from raydali.data.stream.class_mixing import ClassMixing, fitting_window
from raydali.data.stream.read_together import ReadTogether
from raydali.data.stream.stream import Stream
from raydali.launch.options import LaunchOptions

HIGH = 2.0
"""Bytes read for a byte of samples that are worth blocks, and a warning if blocks do not help."""
_LOW = 1.25
"""An amplification that is low enough to look no further."""
_GROUPS = 1, 2, 4, 8
"""Row groups of a block: blocks of more are less torn where row groups are short, or lack samples."""
_WINDOWS = 8, 4
"""Blocks of a window, if those that are usual take too much memory."""

Options = TypeVar("Options", bound=LaunchOptions)
Labels = NDArray[np.int64] | None


def with_row_groups(
    options: Options,
    source: Source,
    labels: Labels,
    *,
    workers: Collection[int],
    cpus: int,
    tell: Callable[[str], None],
    warn: Callable[[str], None],
) -> Options:
    """Return the options with blocks, if they are open and the source needs them.

    Args:
        options: with all other settings of the stream.
        source: the training samples; they may be read with others, if they have `read_together`.
        labels: of the samples, if each has one.
        workers: the smallest and the largest number of workers.
        cpus: of each worker.
        tell: takes a line about what is read.
        warn: takes a line if much more is read than the samples.
    """
    together: ReadTogether | None = getattr(source, "read_together", None)
    is_open = options.shuffle_block is None
    options = replace(options, shuffle_block=options.shuffle_block or 0, shuffle_apart=options.shuffle_apart or False)
    if together is None or together.fits:
        return options
    # PyTorch's loader has a process for each thread, and each of them reads for itself.
    processes = cpus if getattr(options, "loader", None) == "torch" else 1

    def amplification(stream: Stream) -> float:
        return max(together.amplification(stream, each, processes) for each in {*workers})

    stream = options.stream(len(source))
    reads = amplification(stream)
    if reads <= HIGH:
        return options
    begin = f"rows of Parquet are read in groups of {together.samples_per_group}"
    if not is_open or options.repeats > 1:  # of the same block, repeats would not stay apart
        warn(f"{begin}: in this order, {reads:.1f} times the bytes of the images are read; see --shuffle-block")
        return options
    best, least = stream, reads / HIGH
    for each in _candidates(stream, together.samples_per_group, labels):
        if (its := amplification(each)) < least:
            best, least = each, its
        if least <= _LOW:
            break
    if best is stream:
        warn(
            f"{begin}, {reads:.1f} times the bytes of the images, and blocks would not help: write smaller row groups "
            "or class folders"
        )
        return options
    said = f"{begin}: --shuffle-block {best.shuffle_block} reads {least:.1f} times the bytes of the images"
    if least > HIGH:
        warn(f"{said}; smaller row groups or class folders would need less")
    else:
        tell(f"{said}, a full shuffle {reads:.1f} times")
    return replace(options, shuffle_block=best.shuffle_block, shuffle_window=best.shuffle_window, shuffle_apart=True)


def _candidates(stream: Stream, group: int, labels: Labels) -> Iterator[Stream]:
    """Yield streams in blocks that mix the classes, those with large windows first."""
    for window in (None, *_WINDOWS):
        for groups in _GROUPS:
            if group * groups >= stream.samples:
                break
            each = replace(stream, shuffle_block=group * groups, shuffle_apart=True)
            each = replace(each, shuffle_window=fitting_window(labels, each) if window is None else window)
            if labels is None or ClassMixing.of(labels, each).is_enough:
                yield each
