"""The templates of the messages in the sources: what errors, warnings and printed lines are made of."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.cluster import ROOT

VALUE = "#" * 8
"""Stands for a value: eight characters, as long as many are."""
_SINKS = re.compile(r"\w*(Error|Broken|Note|Failed|Fault|Away|Warning)|_?(warn|warning|print|note|error|require)")
_OF_LOGGING = re.compile(r"%[-\d.]*[sdrfg]")


class Template(NamedTuple):
    """A message's text with `VALUE` for each of its values, and the place of its call."""

    place: str
    text: str


def templates() -> Iterator[Template]:
    """The templates in raydali/ and jobs/ that are written where the message is given."""
    for path in sorted([*Path(ROOT, "raydali").rglob("*.py"), *Path(ROOT, "jobs").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _SINKS.fullmatch(ast.unparse(node.func).rpartition(".")[2]):
                for text in filter(None, map(_text, node.args)):
                    if " " in text:
                        yield Template(f"{path.relative_to(ROOT)}:{node.lineno}", _OF_LOGGING.sub(VALUE, text))


def _text(node: ast.expr) -> str:
    """The text that an expression writes out; empty for one that only names a value."""
    match node:
        case ast.Constant(str() as text):
            return text
        case ast.JoinedStr(parts):
            return "".join(_text(part) or VALUE for part in parts)
        case ast.BinOp(left, ast.Add(), right):
            return (_text(left) or VALUE) + (_text(right) or VALUE)
        case ast.IfExp(_, one, other):
            return max(_text(one), _text(other), key=len)
    return ""
