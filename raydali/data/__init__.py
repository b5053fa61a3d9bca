"""Makes batches of ids: the stream, sources, pipelines of tasks, loaders. No Ray: ranks are integers."""
