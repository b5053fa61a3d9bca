"""Fixtures of several files here: tar shards and trees of files."""

from tests.support.tars import pack, tar_cache
from tests.support.trees import nasty

__all__ = ["nasty", "pack", "tar_cache"]
