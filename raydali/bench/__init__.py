"""The benchmarks, each on one machine: loaders, alone and in training, against others; and costs that grow."""
