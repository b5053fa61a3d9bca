"""From samples to tensors: a pipeline for each task, by DALI and by its twin on the CPU."""
