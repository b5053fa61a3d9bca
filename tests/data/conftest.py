"""Fixtures of several files here: tar shards, lists and trees of files."""

from tests.support.lists import write
from tests.support.tars import pack, tar_cache
from tests.support.trees import nasty

__all__ = ["nasty", "pack", "tar_cache", "write"]
