"""Times users' Python functions in a DALI graph, which delay decoding and the training thread unnoticed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from nvidia.dali import fn

from raydali.data.sources.read_timing import PythonCpuTime

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode


T = TypeVar("T")


@contextmanager
def timed_python(add: Callable[[float], None], computing: PythonCpuTime) -> Iterator[None]:
    """Time each call of a `fn.python_function` in the graphs that are made inside, except raydali's own.

    Args:
        add: takes seconds of the clock.
        computing: takes those of a core.
    """
    original = fn.python_function

    def python_function(*inputs: Any, function: Callable[..., Any], **options: Any) -> "DataNode":
        of_users = not (getattr(function, "__module__", None) or "").startswith("raydali.")
        return original(*inputs, function=_timed(function, add, computing) if of_users else function, **options)

    fn.python_function = python_function
    try:
        yield
    finally:
        fn.python_function = original


def _timed(function: Callable[..., T], add: Callable[[float], None], computing: PythonCpuTime) -> Callable[..., T]:
    @wraps(function)
    def call(*arguments: Any) -> T:
        began = time.perf_counter()
        try:
            with computing.running():
                return function(*arguments)
        finally:
            add(time.perf_counter() - began)

    return call
