"""What every test needs: no deadline on a busy machine, SIGINT in what it starts, no `gpu` test without a GPU."""

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Without a GPU, Triton interprets its kernels on the host; it must know this before it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.support.object_stores", "tests.support.run_folders"]

settings.register_profile("raydali", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=30)
settings.load_profile("raydali")

# A shell script's background job ignores SIGINT, and so does what it starts; processes do not inherit a handler.
signal.signal(signal.SIGINT, signal.default_int_handler)


# What is imported to collect tests is no garbage: to look through it again and again takes seconds.
gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """To import what tests on GPUs use takes seconds, where none of them is asked for."""
    is_gpu = collection_path == Path(__file__).with_name("gpu")
    return True if is_gpu and "not gpu" in str(config.getoption("markexpr")) else None


def pytest_collection_finish() -> None:
    gc.enable()
    if "nvidia.dali" in sys.modules:
        from tests.support import untraced as untraced


@pytest.fixture(autouse=True, scope="module")
def _modules_are_no_garbage() -> None:
    """A loader that closes collects garbage, which takes half a second where PyTorch's modules are looked through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _indexes_are_in_no_storage() -> None:
    """A command line that an earlier module parsed names a storage of runs, where indexes would be kept, too."""
    from raydali.data.index.cache import cache_with_runs

    cache_with_runs(None)


def pytest_unconfigure() -> None:
    """Libraries report what is not collected at the end as a leak."""
    gc.unfreeze()


@pytest.hookimpl(trylast=True)  # after -m has deselected, so that torch is not imported for nothing
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_tests:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, a process takes a whole file, which shares its fixtures, or a whole `xdist_group`."""
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):  # type: ignore[misc]  # it comes without types
        def _split_scope(self, nodeid: str) -> str:
            return str(super()._split_scope(nodeid)).split("::")[0]

    return Scheduling(config, log)
