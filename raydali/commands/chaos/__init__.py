"""A training run on a real cluster of several nodes on this machine, and what is done to it: `raydali chaos`."""
