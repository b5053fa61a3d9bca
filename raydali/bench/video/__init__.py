"""`raydali bench video`: how fast loaders of video clips deliver frames."""
