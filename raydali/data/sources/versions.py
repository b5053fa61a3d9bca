"""What tells one version of a file from another: its size, and a number for its ETag.

A listing of a bucket has both for each object, and they are kept here for the indexes that are made of the listing.
"""

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Versions = NDArray[np.int64]
"""(N, 2): sizes in bytes, -1 where unknown; and positive numbers for ETags, 0 where unknown, or negative times of the
last change in ns, which tell versions apart, but may differ for the same content."""

LISTED: "dict[str, array[int]]" = {}
"""By the URI of a listed root, the newest last: for each object a hash of BUCKET/KEY, and its version."""


def versions_of(root: str, paths: Iterator[str]) -> Versions | None:
    """Return the versions of files at these paths below a root, as the newest listings had them; None if one lacks."""
    if not any(LISTED.values()):
        return None
    rows, prefix = np.concatenate([*LISTED.values()]).reshape(-1, 3), f"{root.partition('://')[2]}/"
    wanted = np.fromiter((hash(prefix + path) for path in paths), np.int64)
    order = np.argsort(rows[:, 0], kind="stable")
    found = rows[order[np.searchsorted(rows[:, 0], wanted, "right", sorter=order) - 1]]
    return found[:, 1:] if (found[:, 0] == wanted).all() else None
