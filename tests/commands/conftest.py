"""This file lets commands examine samples in the process of the test; test_all_samples.py has the child processes."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from raydali.host import all_samples


class Here:
    """Children that are this process: a process takes a second to start."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[[Any], Any], item: Any) -> "Future[Any]":
        future = Future[Any]()
        try:
            future.set_result(function(item))
        except Exception as error:
            future.set_result(error)
        return future

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def examined_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_samples, "Children", Here)
