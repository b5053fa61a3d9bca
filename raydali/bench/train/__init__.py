"""`raydali bench train`: training on real data compared with its ceiling."""
