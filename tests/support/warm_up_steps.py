"""Takes the steps that warm-up and the ceiling's measurement yield, as a job's loop does."""

from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")


def take_all(steps: Generator[Callable[[], object], None, Result]) -> Result:
    """Call each step that is yielded; return what the generator returns."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        step()
