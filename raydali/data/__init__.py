"""Makes batches of ids. No Ray: ranks are integers."""
