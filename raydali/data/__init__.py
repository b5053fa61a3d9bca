"""Makes batches of ids: the stream, what a sample is, bytes, pictures, pipelines of tasks, loaders. No Ray: ranks are integers."""
