"""The benchmarks, each on one machine: loaders alone and in training beside their peers, and what grows with a run."""
