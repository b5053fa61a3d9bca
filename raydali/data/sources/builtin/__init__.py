"""Small data sets that jobs use where no --data is given."""
