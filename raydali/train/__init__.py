"""What a training loop needs beside its data: worker, precision, optimisation, evaluation, checkpoints."""
