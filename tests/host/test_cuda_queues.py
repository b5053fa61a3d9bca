"""All of a GPU's queues are asked for, where that is still possible."""

import os
import warnings

import pytest
import torch

from raydali.host import cuda_queues
from tests.support.messages import mentioning


def test_is_asked_for_until_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda_queues.VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match=mentioning("CUDA_DEVICE_MAX_CONNECTIONS 1")):
        cuda_queues.set_max_connections()
    assert os.environ[cuda_queues.VARIABLE] == "1"
    with warnings.catch_warnings(action="error"):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        cuda_queues.set_max_connections()
        assert os.environ[cuda_queues.VARIABLE] == "32"
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        cuda_queues.set_max_connections()  # it is set by now
