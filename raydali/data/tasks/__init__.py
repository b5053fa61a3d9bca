"""Pipelines that make tensors of samples, one for each task: a DALI graph, and its twin on the CPU."""
