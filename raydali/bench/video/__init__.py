"""`raydali bench video`."""
