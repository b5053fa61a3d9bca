"""The rules by which files become samples. A run keeps those that it began with, so that its ids stay the same.

1    any file with the ending of a sample is one, except in hidden folders
2    what other systems leave behind is not, and classes in archives of train/ are the folders in there
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FILE_RULES = "file_rules"
"""The setting of a run with their number; runs of earlier versions have none, and follow the first."""
FIRST, NEWEST = 1, 2
LEFT_BEHIND = (
    r"(^|/)(__MACOSX|network trash folder|temporary items|lost\+found|lost\.dir|found\.\d{3}|__pycache__|"
    r"\$recycle\.bin|system volume information|@eadir|@tmp|#recycle|#snapshot|@recycle|@recently-snapshot|"
    r"~snapshot)(/|$)"
)
"""Folders, in any case, of macOS, Linux, Android, Python, Windows, and servers by Synology, QNAP and NetApp."""
LEFT_FILES = "._", ".trashed-", ".pending-"
"""Beginnings of names that macOS and Android give files beside samples, with the endings of samples."""

_left_folder = re.compile(LEFT_BEHIND, re.IGNORECASE)
_rules = ContextVar("rules", default=NEWEST)


@contextmanager
def following(rules: int) -> Iterator[None]:
    """Index files by the rules of this number."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def are_newest() -> bool:
    """Return whether the newest rules hold."""
    return _rules.get() >= NEWEST


def is_ignored(folder: str) -> bool:
    """Return whether a folder is hidden, or one that other systems leave behind, or in such a folder."""
    return folder.startswith(".") or "/." in folder or _left_folder.search(folder) is not None
