"""The models of the jobs."""
