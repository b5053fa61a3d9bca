"""`raydali bench scale`."""
