"""`raydali bench`: loaders and training measured on one machine, and compared with alternatives."""
