"""`raydali cluster`: an autoscaling Ray cluster on this machine only, for trials and tests."""
