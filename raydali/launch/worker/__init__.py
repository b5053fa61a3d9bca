"""What runs in each worker: a job's interface to its run."""
