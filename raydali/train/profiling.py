"""Traces of a few steps, rank by rank: which stage, which operator and which kernel ran when.

A trace opens in Perfetto (ui.perfetto.dev) and chrome://tracing. The stages are NVTX ranges as well, so Nsight Systems
shows them next to DALI's own.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class StepTrace:
    """Profiles the steps of a range, each stage named, and writes one file when they are over.

    Args:
        steps: the range; steps before the first one of this worker are ignored.
        rank: the worker's world rank.
        device: on which the rank computes.
        write: takes the file's name and its contents (gzipped JSON of Chrome's trace format).
    """

    def __init__(self, steps: range, rank: int, device: torch.device, write: Callable[[str, bytes], None]) -> None:
        self._steps, self._rank, self._write = steps, rank, write
        self._on_gpu = device.type == "cuda"
        self._profiler: Any = None
        self._stage: Any = None
        self._first = 0

    def before(self, step: int) -> None:
        """Call before each step."""
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
        self._end_stage()
        self._stage = record_function(name)
        self._stage.__enter__()
        if self._on_gpu:
            torch.cuda.nvtx.range_push(name)

    def after(self, step: int) -> None:
        """End a step; after the last one the file is written, which takes some seconds."""
        if self._profiler is None or step + 1 < self._steps.stop:
            return
        self._end_stage()
        self._profiler.stop()
        with tempfile.TemporaryDirectory(prefix="raydali-") as folder:
            file = Path(folder, "trace.json.gz")
            self._profiler.export_chrome_trace(str(file))
            self._write(f"traces/steps-{self._first}-{step}-rank-{self._rank}.json.gz", file.read_bytes())
        self._profiler = None

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._stage.__exit__(None, None, None)
            self._stage = None
            if self._on_gpu:
                torch.cuda.nvtx.range_pop()
