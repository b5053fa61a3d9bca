"""A worker that replaces a lost one sees the GPUs of the others on its node."""

import pytest

from raydali.launch.worker.process_group import gpus_to_see


@pytest.mark.parametrize(
    ("own", "of_first_workers", "expected"),
    [("1", "0,1", "0,1"), ("2", "0,1", "2"), ("0", "", "0"), ("", "", ""), ("1", "10,11", "1")],
)
def test_a_replacement_sees_the_gpus_of_its_node(own: str, of_first_workers: str, expected: str) -> None:
    assert gpus_to_see(own, of_first_workers) == expected
