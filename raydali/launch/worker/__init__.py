"""Code that runs in each worker: the interface of a training function to its run."""
