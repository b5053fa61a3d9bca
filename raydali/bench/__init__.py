"""The benchmarks of one machine: loaders and training compared with alternatives, and costs that grow with a run."""
