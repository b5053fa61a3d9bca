"""Loaders: they read the samples of an order through a task's pipeline, and replace broken ones."""
