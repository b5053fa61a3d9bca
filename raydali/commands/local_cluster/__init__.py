"""`raydali cluster`: an autoscaling Ray cluster on this machine alone, for trials and tests."""
