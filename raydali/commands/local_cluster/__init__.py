"""An autoscaling Ray cluster on this machine alone, for trying things and for tests: `raydali cluster`."""
