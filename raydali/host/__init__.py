"""The machine: facts, checks, CPU times, what its hardware does best, processes and signals."""
