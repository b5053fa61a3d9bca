"""From ids to batches: sources, the stream, augmentation, pipelines, loaders. No Ray: ranks are integers."""
