"""Parts of files and objects as bytes: local or in buckets, with retries, counts and a cache of the node."""
