"""Names how far each stage of a loader works ahead, and how many threads it has.

    stage                                   ahead                   threads
    prepare: read, screen, inputs           PREPARED batches        as many, see below for reading
    DALI: decode, augment                   DECODED batches         `threads` of the loader, and the GPU
    clips on a GPU: decode                  PREPARED batches        DECODERS_PER_ENGINE for each video engine
    DALI: resize clips                      CLIPS batches           the GPU
    steps of training                       STEPS_AHEAD batches     the GPU's queue

What reads files has threads of its own: read/local_files.py, read/contents.py, read/objects.py.
"""

PREPARED = 4
"""Batches that are prepared at the same time, to hide the latency of object stores."""
DECODED = 4
"""Batches in flight in DALI. Its stages together take longer than one step, so 2 would stall training."""
CLIPS = 2
"""Batches of clips in flight in DALI, which are large."""
DECODERS_PER_ENGINE = 1.5
"""Measured: fewer leave engines idle, more wait for each other in the interpreter."""
STEPS_AHEAD = 2
"""Maximum batches queued ahead of the GPU. Unbounded, the host would run some 50 steps ahead, until CUDA's queues are
full, and hold as many batches in GPU memory."""
