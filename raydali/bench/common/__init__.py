"""Options, processes, results and synthetic data that all benchmarks use."""
