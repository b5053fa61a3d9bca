"""`raydali bench train`."""
