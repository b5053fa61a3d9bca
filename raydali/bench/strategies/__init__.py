"""`raydali bench strategies`."""
