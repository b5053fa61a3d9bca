"""What a message mentions: values, options, paths. Tests leave its wording free."""

import re


def mentioning(values: str) -> str:
    """Return a pattern for a line that mentions all of these, which are separated by spaces, in any order."""
    return "(?m)^" + "".join(rf"(?=.*{_whole(value)})" for value in values.split())


def mentions(text: str, values: str) -> bool:
    """Return whether one line of the text mentions all of these, which are separated by spaces, in any order."""
    return re.search(mentioning(values), text) is not None


def _whole(value: str) -> str:
    """Not 1 in 10, 1.5 or v1; but gone.jpg in /data/gone.jpg."""
    begin = r"(?<![\w.])" if re.match(r"\w", value) else ""
    end = r"(?!\w|\.\d)" if re.search(r"\w$", value) else ""
    return begin + re.escape(value) + end
