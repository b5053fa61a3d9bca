"""What `raydali NAME` runs, apart from benchmarks; imported by `cli` alone."""
