"""The subcommands of `raydali` except the benchmarks."""
