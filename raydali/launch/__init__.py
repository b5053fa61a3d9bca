"""From a config to a TorchTrainer to a result: the one place that starts Ray."""
