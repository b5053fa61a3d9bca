"""A run's data on storage: its folder, events, checkpoints, and the trace of its samples."""
