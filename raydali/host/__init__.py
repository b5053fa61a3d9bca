"""What raydali asks of a machine: facts, checks, CPU times, CUDA queues, processes and signals."""
