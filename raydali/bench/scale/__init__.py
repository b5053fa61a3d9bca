"""`raydali bench scale`: costs that grow with the number of workers."""
