"""Models, their trained weights, the step, and evaluation."""

import sys
from importlib import import_module
from types import ModuleType

_JOINED = {
    f"{__name__}.averaging": f"{__name__}.optim",
    f"{__name__}.mixing": f"{__name__}.losses",
    f"{__name__}.models.video": f"{__name__}.models.classification",
}
"""Modules that have joined others. Jobs that were copied from earlier versions import them by these names."""


class _Joined(ModuleType):
    """A module whose contents are in another one, which is imported when they are asked for."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(_JOINED[self.__name__]), name)


sys.modules.update({name: _Joined(name) for name in _JOINED})
