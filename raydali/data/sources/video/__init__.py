"""Videos: their packets, their clips, and where the frames of a clip are."""
