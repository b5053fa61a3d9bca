"""What a run leaves on storage: its folder, checkpoints, and the trace of its samples."""
