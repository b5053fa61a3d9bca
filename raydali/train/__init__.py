"""The parts of a training loop besides its data: worker, precision, optimisation, evaluation, checkpoints."""
