"""The subcommands of `raydali` other than the benchmarks, and what they run."""
