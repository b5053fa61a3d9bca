"""All of a GPU's queues are asked for, where that is still possible."""

import os
import warnings

import pytest
import torch

from raydali.host import hardware
from tests.support.messages import mentioning


def test_is_asked_for_until_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hardware.QUEUES_VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match=mentioning("CUDA_DEVICE_MAX_CONNECTIONS 1")):
        hardware.set_max_connections()
    assert os.environ[hardware.QUEUES_VARIABLE] == "1"
    with warnings.catch_warnings(action="error"):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        hardware.set_max_connections()
        assert os.environ[hardware.QUEUES_VARIABLE] == "32"
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        hardware.set_max_connections()  # it is set by now
