"""What a verdict advises: options that the job at hand has, takes, and is not run with already."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from jobs import detection, imagenet, restoration, segmentation, video
from raydali.errors import UsageError
from raydali.measure.costs import Straggler
from raydali.measure.verdict import CAUSES, Finding, describe
from raydali.options.every_job import TrainingOptions
from tests.support.messages import mentions

JOBS: list[TrainingOptions] = [job.Config() for job in (imagenet, detection, restoration, segmentation, video)]
FOUND: dict[str, Any] = {
    "cost": 0.5,
    "largest": (0.1, "checkpoint"),
    "steps": 5,
    "seconds": 9.0,
    "wait": 0.4,
    "mutual_wait": 0.1,
    "of_ceiling": 0.9,
    "ranks": 2,
    "nodes": 1,
    "straggler": Straggler({"rank": 1, "node": "a"}, 1.0, None),
    "contended_node": "a",
    "foreign_cpu_share": 0.0,
    "idle": 0.0,
    "device": "cpu",
    "has_bf16": True,
    "gpu_busy": 0.5,
}


def advice(cause: str, options: TrainingOptions | None, **facts: Any) -> str:
    return describe(Finding(**(FOUND | {"cause": cause, "options": options} | facts))).partition(". Try ")[2]


@pytest.mark.parametrize("options", JOBS, ids=lambda options: type(options).__module__)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("cause", CAUSES)
def test_jobs_have_the_options_that_are_advised(options: TrainingOptions, device: str, cause: str) -> None:
    names = {field.name for field in fields(options)} | {"no_ceiling"}
    for changed in (options, replace(options, ceiling=False, checkpoint_every=5, loader="torch", precision="fp32")):
        advised = re.findall(r"--([a-z-]+)", advice(cause, changed, device=device))
        assert {name.replace("-", "_") for name in advised} <= names


def test_what_is_slower_there_is_not_advised() -> None:
    slow = imagenet.Config(precision="fp32")
    assert "bf16" in advice("step-bound", slow) and "bf16" in advice("step-bound", None)
    for options in (slow, None):
        assert "bf16" not in advice("step-bound", options, has_bf16=False)
        on_old_gpu = advice("step-bound", options, has_bf16=False, device="cuda")
        assert "fp16" in on_old_gpu and "bf16" not in on_old_gpu
    assert "--compile" not in advice("step-bound", slow, device="cuda", steps=100)  # of a run of 90 x 100


def test_blocks_are_advised_as_they_can_be_mixed() -> None:
    for options in JOBS:
        assert "--shuffle-block 64 " in advice("storage", options, useful_block=lambda: 64)
        assert "--shuffle-block" not in advice("storage", options, useful_block=lambda: 0)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_loop_of_one_s_own_is_advised_without_options(cause: str) -> None:
    assert "--" not in advice(cause, None)


def test_what_a_job_refuses_is_not_advised() -> None:
    with pytest.raises(UsageError, match="--compile"):
        detection.Config(compile=True)
    assert advice("step-bound", detection.Config(), device="cuda", steps=200) == "more GPUs"


def test_what_is_so_already_is_not_advised() -> None:
    slow, compiled = imagenet.Config(precision="fp32", loader="torch"), imagenet.Config(compile=True)
    gpu: dict[str, Any] = {"device": "cuda", "steps": 200}
    assert advice("step-bound", slow, **gpu) == "--precision bf16"
    assert advice("step-bound", imagenet.Config(precision="fp16"), **gpu) == "--compile"
    assert advice("step-bound", replace(compiled, precision="bf16"), **gpu) == "more GPUs"
    assert advice("step-bound", replace(compiled, precision="bf16")) == "a GPU"
    assert advice("cpu decode", slow) == "--loader dali"
    assert "--loader" not in advice("cpu decode", imagenet.Config())
    assert mentions(advice("cpu decode", imagenet.Config(), idle=0.3), "--cpus-per-worker 30%")
    assert "--checkpoint-every" not in advice("checkpoint", imagenet.Config())
    assert "--checkpoint-every" in advice("checkpoint", imagenet.Config(checkpoint_every=5))
    assert advice("contention", imagenet.Config()) == "fewer --workers"
    assert "--workers" not in advice("contention", imagenet.Config(), ranks=1)
    assert advice("launch-bound", imagenet.Config(cuda_graph=False)) == "--cuda-graph"
    assert advice("launch-bound", imagenet.Config()) == "--compile"
    assert advice("launch-bound", detection.Config()) == "a larger --batch-size"
    assert "--no-ceiling" not in advice("compile", imagenet.Config())
    assert "--no-ceiling" in advice("compile", imagenet.Config(ceiling=False))


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("foreign_cpu_share", [0.0, 0.5])
def test_one_machine_is_told_nothing_of_nodes(cause: str, foreign_cpu_share: float) -> None:
    facts = FOUND | {"cause": cause, "options": imagenet.Config(), "foreign_cpu_share": foreign_cpu_share}
    assert "node" not in describe(Finding(**facts))
    if cause in ("straggler", "contention"):
        assert "node" in describe(Finding(**facts | {"nodes": 2, "ranks": 4}))


@pytest.mark.parametrize("options", [*JOBS, None], ids=lambda options: type(options).__module__)
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_verdict_fits_two_lines_of_a_terminal(options: TrainingOptions | None, cause: str, nodes: int) -> None:
    other = {"straggler": Straggler({"rank": 1023, "node": "0123abcd"}, 1.0, (12.3, 4.5)), "foreign_cpu_share": 0.5}
    for facts in ({}, other, {"idle": 0.5}, {"of_ceiling": None}):
        assert len(describe(Finding(**(FOUND | facts | {"cause": cause, "options": options, "nodes": nodes})))) <= 160


def test_costs_below_those_that_are_named_are_told() -> None:
    facts = FOUND | {"cause": "step-bound", "options": None, "largest": (0.09, "loader-bound")}
    assert mentions(describe(Finding(**facts)), "90% data 9%")
    assert not mentions(describe(Finding(**facts | {"of_ceiling": 0.96})), "9%")


def test_prepare_is_advised_only_for_data_that_it_accepts() -> None:
    for cause in ("cpu decode", "gpu decode", "gpu contention"):
        assert "`raydali prepare`" in advice(cause, imagenet.Config())
        assert all("prepare" not in advice(cause, options) for options in JOBS[1:])
