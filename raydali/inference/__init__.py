"""Use of a trained run: its model on other samples, on any number of workers."""
