"""Traces of a few steps on each rank: when each stage, operator and kernel ran.

Perfetto (ui.perfetto.dev) and chrome://tracing open a trace. The stages are also NVTX ranges, so Nsight Systems shows
them together with DALI's ranges.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class StepTrace:
    """A profiler of a range of steps, which writes one file after the last of them.

    Args:
        steps: the range; steps before the first one of this worker are ignored.
        rank: the worker's world rank.
        device: the device of the rank.
        write: called with the file's name and its contents (gzipped JSON in Chrome's trace format).
    """

    def __init__(self, steps: range, rank: int, device: torch.device, write: Callable[[str, bytes], None]) -> None:
        self._steps, self._rank, self._write = steps, rank, write
        self._on_gpu = device.type == "cuda"
        self._profiler: Any = None
        self._stage = ExitStack()
        self._first = 0

    def before(self, step: int) -> None:
        """Start the profiler before the first step of the range; call it before each step."""
        if step in self._steps and self._profiler is None:
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_gpu else [])
            self._profiler = profile(activities=activities)
            self._profiler.start()
            self._profiler.add_metadata_json("rank", str(self._rank))
            self._first = step

    def stage(self, name: str) -> None:
        """End the current stage, and begin this one."""
        if self._profiler is None:
            return
        self._stage.close()
        self._stage.enter_context(record_function(name))
        if self._on_gpu:
            self._stage.enter_context(torch.cuda.nvtx.range(name))

    def after(self, step: int) -> None:
        """End a step; after the last one write the file, which takes some seconds."""
        if self._profiler is None or step + 1 < self._steps.stop:
            return
        self._stage.close()
        self._profiler.stop()
        with tempfile.TemporaryDirectory(prefix="raydali-") as folder:
            file = Path(folder, "trace.json.gz")
            self._profiler.export_chrome_trace(str(file))
            self._write(f"traces/steps-{self._first}-{step}-rank-{self._rank}.json.gz", file.read_bytes())
        self._profiler = None
