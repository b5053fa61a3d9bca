"""The order of samples, in pure integers."""
