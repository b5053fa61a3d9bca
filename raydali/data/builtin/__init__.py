"""Small data sets that jobs use without --data."""
