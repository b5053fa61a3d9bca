"""The validation metrics of the jobs."""
