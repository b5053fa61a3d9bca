"""The cache of a node: what its workers read from buckets, on a local disk."""
