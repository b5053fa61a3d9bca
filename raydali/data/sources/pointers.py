"""Pointers of Git LFS and git-annex: short texts in place of files that have not been fetched."""

_POINTERS = {
    b"version https://git-lfs.github.com/spec/v1": ("Git LFS", "git lfs pull"),
    b"/annex/objects/": ("git-annex", "git annex get ."),
}
_ENOUGH = 12  # bytes that no other file begins with


def why_pointer(head: bytes) -> str:
    """Return the reason why a file with these first bytes, at least 12, is a pointer; empty if it is none."""
    if len(head) >= _ENOUGH:
        for begin, (tool, command) in _POINTERS.items():
            if begin.startswith(head[: len(begin)]):
                return f"a pointer of {tool}, not the file: run `{command}`"
    return ""
