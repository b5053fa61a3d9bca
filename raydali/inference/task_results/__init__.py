"""What each kind of job predicts, and how it is evaluated."""
