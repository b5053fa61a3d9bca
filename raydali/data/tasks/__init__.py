"""Pipelines that convert samples to tensors, one for each task: a DALI graph, and the same by Pillow on the CPU."""
