"""This file refuses imports of modules that raydali no longer has, as copies of jobs of older versions have them.

The error names the public names to import in their place.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress


class OldImports:
    """A finder of modules, the last of `sys.meta_path`: it is asked for what no other finder knows.

    Args:
        homes: by public name, its module and its name there.
    """

    def __init__(self, homes: Mapping[str, tuple[str, str]]) -> None:
        self._homes = homes

    def find_spec(self, name: str, *_: object) -> None:
        """Refuse `from raydali.OLD import NAME`; all else fails as any other import.

        Raises:
            ModuleNotFoundError: such a statement imports this module, or one below it.
        """
        if not name.startswith("raydali."):
            return
        module, names = _statement(name)
        if not names:
            return
        found = {old: self._public(module, old) for old in names}
        if unknown := [old for old, public in found.items() if public is None]:
            remedy = (
                f"raydali has no public name {unknown[0]}: `raydali new` copies a job of this version, to change it"
            )
        else:
            imported = (public if public == old else f"{public} as {old}" for old, public in found.items())
            remedy = f"write `from raydali import {', '.join(imported)}`"
        raise ModuleNotFoundError(f"the module {module} is gone; {remedy}", name=name)

    def _public(self, module: str, old: str) -> str | None:
        """Return the public name of what a module had; of several, the one whose module has the last name of this."""
        found = {name: home for name, (home, name_there) in self._homes.items() if name_there == old}
        if len(found) > 1:
            last = module.rpartition(".")[2]
            found = {name: home for name, home in found.items() if home.rpartition(".")[2] == last}
        return next(iter(found)) if len(found) == 1 else None


def _statement(name: str) -> tuple[str, list[str]]:
    """Return module and names of the `from ... import` that imports a module, or names nothing."""
    import ast  # here, since hardly any process needs them
    import linecache

    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith("<frozen importlib") and frame.f_back:
        frame = frame.f_back
    line, text = frame.f_lineno, "".join(linecache.getlines(frame.f_code.co_filename))
    with suppress(SyntaxError):  # of a notebook's cell, which may have more than Python
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.lineno == line and f"{node.module}.".startswith(name):
                return str(node.module), [alias.name for alias in node.names]
    return "", []
