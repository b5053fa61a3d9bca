"""The rules by which files become samples, and the files that could be samples but are not read.

Any file with the ending of a sample is one, except in hidden folders, and in what other systems leave behind.

A warning counts the files that could be samples but are not read. Common companions of samples (notes, tables,
checksums, files of the desktop) are not mentioned.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from raydali.text import plural, summarize

Listing = dict[str, list[str]]
"""Names of files by folder relative to the root, "" for the root itself; unordered."""
LEFT_BEHIND = (
    r"(^|/)(__MACOSX|network trash folder|temporary items|lost\+found|lost\.dir|found\.\d{3}|__pycache__|"
    r"\$recycle\.bin|system volume information|@eadir|@tmp|#recycle|#snapshot|@recycle|@recently-snapshot|"
    r"~snapshot)(/|$)"
)
"""Folders, in any case, of macOS, Linux, Android, Python, Windows, and servers by Synology, QNAP and NetApp."""
LEFT_FILES = "._", ".trashed-", ".pending-"
"""Beginnings of names that macOS and Android give files beside samples, with the endings of samples."""
_EXPECTED = re.compile(
    r"\..*|(eh)?thumbs\.db|icon\r|.*:zone\.identifier|(readme|licen[cs]e|copying|makefile|_success|\w*sums?)(\.\w+)?"
    r"|.*\.(txt|md|rst|jsonl?|csv|tsv|xml|ya?ml|toml|ini|cfg|log|html?|url|lnk|py|sh|md5|sha\d+)",
    re.IGNORECASE | re.DOTALL,
)
"""Names of files that are never samples."""
LEFT = "left behind by other systems"
"""The name of such files in messages."""
_ENDING = re.compile(r"\.\w{1,8}$", re.ASCII)
_KINDS_SHOWN = 5

_left_folder = re.compile(LEFT_BEHIND, re.IGNORECASE)
_log = logging.getLogger(__name__)


def is_ignored(folder: str) -> bool:
    """Return whether a folder is hidden, or one that other systems leave behind, or in such a folder."""
    return folder.startswith(".") or "/." in folder or _left_folder.search(folder) is not None


@dataclass(frozen=True)
class SkippedFiles:
    """Files that could be samples but are not read.

    Attributes:
        kinds: counts by extension in lower case, or by a description.
        folders: counts by the first folder of their path.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    folders: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, folder: str, count: int = 1) -> None:
        """Count some files of a folder."""
        self.kinds[kind] += count
        self.folders[folder.partition("/")[0]] += count

    def warn(self, root: str, extensions: tuple[str, ...]) -> None:
        """Warn once which files were skipped, in which folders, and what to do about it."""
        if not self.kinds:
            return
        where = summarize(f"{name!r} {count}" for name, count in _most(self.folders))
        remedy = f": convert them to {'JPEG or PNG' if '.jpg' in extensions else 'MP4'}"
        is_format = any(kind.startswith(".") for kind in self.kinds)
        _log.warning("%s: %s (%s)%s", root, describe_skipped(self.kinds), where, remedy if is_format else "")


def describe_skipped(kinds: Mapping[str, int]) -> str:
    """Describe how many files were skipped by kind, the most frequent first."""
    ordered, total = _most(kinds), sum(kinds.values())
    shown = [f"{count:,} {kind}" for kind, count in ordered[:_KINDS_SHOWN]]
    if others := sum(count for _, count in ordered[_KINDS_SHOWN:]):
        shown.append(f"{others:,} others")
    return f"{plural(total, 'file')} skipped: {', '.join(shown)}"


def _most(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def kind_of(name: str) -> str | None:
    """The extension of a file that could be a sample, in lower case; None for a common companion of samples."""
    if _EXPECTED.fullmatch(name):
        return None
    ending = _ENDING.search(name)
    return ending[0].lower() if ending else "without extension"


def select_files(listing: Listing, extensions: tuple[str, ...]) -> tuple[Listing, SkippedFiles]:
    """Return the files with one of these extensions by folder, unordered, and the others.

    Hidden folders such as .ipynb_checkpoints, and what other systems leave behind, are ignored at any depth.

    Args:
        listing: from `list_tree`; it is emptied to save memory.
        extensions: in lower case; the files' own may be in any case.
    """
    selected, skipped = Listing(), SkippedFiles()
    while listing:
        folder, names = listing.popitem()
        chosen = [name for name in names if name.lower().endswith(extensions)]
        if is_ignored(folder):
            if chosen:
                hidden = folder.startswith(".") or "/." in folder
                skipped.add("in hidden folders" if hidden else LEFT, folder, len(chosen))
            continue
        if leftovers := {name for name in chosen if name[0] == "." and name.startswith(LEFT_FILES)}:
            skipped.add(LEFT, folder, len(leftovers))
            chosen = [name for name in chosen if name not in leftovers]
        selected[folder] = chosen
        if len(chosen) < len(names):
            for kind in map(kind_of, set(names).difference(chosen)):
                if kind is not None:
                    skipped.add(kind, folder)
    return selected, skipped


def skip_root(listing: Listing, skipped: SkippedFiles) -> None:
    """Remove the files in the root itself, which have no class."""
    if names := listing.pop("", None):
        skipped.add("in no class folder", os.curdir, len(names))
