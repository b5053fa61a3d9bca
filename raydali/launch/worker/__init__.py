"""Code that runs in each worker: the job's interface to its run."""
