"""`raydali bench loader`."""
