"""The parts of a training loop except its data: worker, precision, optimization, evaluation, checkpoints."""
