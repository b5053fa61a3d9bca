"""The machine: facts, checks, CPU times, CUDA queues, processes and signals."""
