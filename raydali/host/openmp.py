"""The threads of OpenMP, with which PyTorch computes on CPUs.

By default, a thread that has done its share of an operation keeps its core busy until the others have done theirs.
Where a loader or another process needs that core too, all wait for each other.
"""

import os

ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""Lets threads sleep while they wait."""


def set_wait_policy() -> None:
    """Let threads sleep, unless the environment says otherwise; before PyTorch is imported, which reads it once."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
