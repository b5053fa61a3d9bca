"""Numbers, durations and lists as messages and pages print them."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

GIGABYTE = 1e9
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_EXCEPTION = re.compile(r"(rank \d+: )?(\w+\.)*\w*(Error|Exception|Exit|Interrupt|Timeout): *\S")


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return a text whose control characters, and bytes that are not UTF-8, are escaped, such as \x1b and \xff.

    Names of files and classes may have them, which terminals obey and no file of UTF-8 can hold. All that is shown
    passes here; JSON keeps names as they are.

    Args:
        text: any text; bytes that are not UTF-8 are surrogates, as in `os.fsdecode`.
        lines: whether line ends and tabs stay.
    """

    def escaped(match: re.Match[str]) -> str:
        if lines and match[0] in "\n\t":
            return match[0]
        code = ord(match[0])
        return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else repr(match[0])[1:-1]

    return _UNPRINTABLE.sub(escaped, text)


def plural(count: float, noun: str) -> str:
    """A count of something: "1 worker", "2,000 workers", "3 classes"."""
    amount = f"{count:,.0f}" if count == round(count) else f"{count:g}"
    ending = "" if count == 1 else "es" if noun.endswith(("ss", "tch", "x")) else "s"
    return f"{amount} {noun}{ending}"


def summarize(
    items: Iterable[Any],
    limit: int = 3,
    *,
    total: int | None = None,
    separator: str = ", ",
    show: Callable[[Any], str] = str,
) -> str:
    """The first items, and how many more there are: "a, b, c and 4 more", "a; b; c; and 4 more".

    Args:
        items: all of them, or the first of `total`.
        limit: how many are shown.
        total: how many there are, if `items` has only the first of them.
        separator: between two items.
        show: makes an item's text; `repr` for names of files and classes.
    """
    items = list(items)
    total = len(items) if total is None else total
    shown = separator.join(map(show, items[:limit]))
    joint = " and" if separator == ", " else f"{separator}and"
    return f"{shown}{joint} {total - limit} more" if total > limit else shown


def numbered(noun: str, numbers: Sequence[object], limit: int = 8) -> str:
    """Numbers of something: "rank 3", "ranks 0, 1, 2 and 5 more"."""
    return f"{noun}{'s' * (len(numbers) != 1)} {summarize(numbers, limit)}"


def error_line(error: object) -> str:
    """Return the line of an error, or of a traceback, that names the cause; empty if no line has a word.

    It is the last one that begins with the name of an exception, else the last one with a word: torch, Ray and others
    add stacks, hints and rulers after it.
    """
    lines = [line.strip() for line in str(error).splitlines() if re.search(r"[^\W\d_]", line)]
    named = [line for line in lines if _EXCEPTION.match(line)]
    return (named or lines or [""])[-1]


def number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    """The value in this format, or "-" if it was not measured."""
    return "-" if value is None else f"{value:{form}}{unit}"


def rate_text(rate: float) -> str:
    """Return a rate in images/s, with two significant digits below ten: "4040", "0.066"."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def duration(seconds: float) -> str:
    """Seconds with the unit that suits them: "0.45 s", "12.3 s", "3 min 5 s", "2 h 14 min", "3 d 12 h"."""
    if not math.isfinite(seconds):
        return "-"
    if abs(seconds) < 10:
        return f"{seconds:.2g} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
