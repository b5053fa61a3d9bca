"""Common options, processes, results and synthetic data of the benchmarks."""
