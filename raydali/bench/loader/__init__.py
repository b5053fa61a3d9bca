"""`raydali bench loader`: how fast loaders of images deliver batches."""
