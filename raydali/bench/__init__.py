"""The benchmarks: loaders alone and in training, beside their peers, in one run on one machine."""
