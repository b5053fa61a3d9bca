"""Names how far each stage of a loader works ahead, and how many threads it has.

    stage                                   ahead                   threads
    prepare: read, screen, inputs           PREPARED batches        as many, see below for reading
    DALI: decode, augment                   DECODED batches         `threads` of the loader, and the GPU
    clips on a GPU: decode                  PREPARED batches        DECODERS_PER_ENGINE for each video engine
    DALI: resize clips                      CLIPS batches           the GPU
    steps of training                       STEPS_AHEAD batches     the GPU's queue

On a GPU, a "batch" of the first two stages is several small micro-batches: as many as `together` says.

What reads files has threads of its own: read/local_files.py, read/contents.py, read/objects.py.
"""

PREPARED = 4
"""Batches that are prepared at the same time, to hide the latency of object stores."""
DECODED = 4
"""Batches in flight in DALI. Its stages together take longer than one step, so 2 would stall training."""
LEAST_TOGETHER = 256
"""So many images a GPU decodes at once at its full rate, and Python takes as long for one batch as for a larger one.
The first batch must not be smaller than later ones: nvImageCodec's JPEG engines never take more at once than of it."""
MOST_TOGETHER = 4
CLIPS = 2
"""Batches of clips in flight in DALI, which are large."""
DECODERS_PER_ENGINE = 1.5
"""Measured: fewer leave engines idle, more wait for each other in the interpreter."""
STEPS_AHEAD = 2
"""Maximum batches queued ahead of the GPU. Unbounded, the host would run some 50 steps ahead, until CUDA's queues are
full, and hold as many batches in GPU memory."""


def together(batch_size: int) -> int:
    """Return how many micro-batches of this size a GPU decodes as one batch; samples alone may differ in shape."""
    return max(1, min(MOST_TOGETHER, LEAST_TOGETHER // batch_size)) if batch_size > 1 else 1
