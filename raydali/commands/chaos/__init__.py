"""`raydali chaos`: a training run on a real cluster of several nodes on this machine, with injected faults."""
