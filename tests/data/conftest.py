"""Fixtures of several files here: object stores, tar shards, trees of files."""

from tests.data.object_stores import flaky_s3, gcs, s3, s3_url
from tests.data.tars import pack, tar_cache
from tests.data.trees import nasty

__all__ = ["flaky_s3", "gcs", "nasty", "pack", "s3", "s3_url", "tar_cache"]
