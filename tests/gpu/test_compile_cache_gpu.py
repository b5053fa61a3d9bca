"""A compiled and fused ResNet-50 on one GPU takes compiled code from its node, or on another node from its run.

pytest -s tests/gpu/test_compile_cache_gpu.py     prints the seconds of the first forward and backward pass
"""

import os
import time
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from raydali.run.compile_cache import NODE_FOLDERS, CompileCache
from raydali.run.folder import RunFolder
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.worker import Worker
from tests.support.ranks import folder_of, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def first_pass(run: RunFolder, node: str) -> tuple[float, int, int]:
    """The seconds of a first pass, and how many graphs Inductor had to compile and found."""
    os.environ |= {variable: f"{node}/{name}" for variable, name in NODE_FOLDERS.items()}
    device = torch.device("cuda", 0)
    worker = Worker.join(device, cpus=1, node="")
    model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    images = torch.randn(64, 3, 224, 224, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(64, dtype=torch.int64, device=device)
    warnings: list[str] = []
    began = time.perf_counter()
    cache = CompileCache(run, worker, warnings.append)
    cache.load()
    forward_backward = ForwardBackward(
        model,
        lambda images, labels: nn.functional.cross_entropy(model(images), labels),
        worker,
        Precision("bf16", device),
        micro_batches=1,
        compiled=True,
        fused=True,
    )
    forward_backward(images, labels)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    cache.save()
    cache.finish()
    assert not warnings
    found = torch._dynamo.utils.counters["inductor"]
    return seconds, found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]


def test_neither_a_restart_nor_a_new_node_compiles_again(tmp_path: Path) -> None:
    run, other_run = folder_of(tmp_path, "run"), folder_of(tmp_path, "other")
    cases = {
        "nothing is compiled yet": (run, "node"),
        "another run on the node": (other_run, "node"),
        "the run on a new node": (run, "new"),
    }
    results = {}
    for name, (folder, node) in cases.items():
        ((seconds, compiled, found),) = run_ranks(1, first_pass, folder, str(tmp_path / node))
        print(f"{name}: {seconds:.1f} s, {compiled} graphs compiled, {found} found")
        results[name] = compiled, found
    first, *others = results.values()
    assert first[0] > 0
    for compiled, found in others:
        assert compiled == 0 and found >= first[0]
