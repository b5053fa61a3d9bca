"""Videos: their packets and clips, how a clip is decoded on CPUs and GPUs, and the pipeline of the task."""
