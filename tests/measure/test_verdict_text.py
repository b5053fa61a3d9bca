"""What a verdict advises: options that the job at hand has, takes, and is not run with already."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from jobs import detection, imagenet, restoration, video
from raydali.errors import UsageError
from raydali.launch.options import TrainingOptions
from raydali.measure.costs import Straggler
from raydali.measure.verdict_text import _SENTENCES, Finding, describe
from tests.support.messages import mentions

JOBS: list[TrainingOptions] = [job.Config() for job in (imagenet, detection, restoration, video)]
FOUND: dict[str, Any] = {
    "kind": "",
    "cost": 0.5,
    "gain": 1.0,
    "steps": 5,
    "seconds": 9.0,
    "of_ceiling": 0.9,
    "ranks": 2,
    "straggler": Straggler({"rank": 1, "node": "a"}, 1.0, None),
    "contended_node": "a",
    "foreign_cpu_share": 0.0,
    "idle": 0.0,
    "device": "cpu",
    "has_bf16": True,
}


def advice(cause: str, options: TrainingOptions | None, **facts: Any) -> str:
    return describe(Finding(**(FOUND | {"cause": cause, "options": options} | facts))).partition(". Try ")[2]


@pytest.mark.parametrize("options", JOBS, ids=lambda options: type(options).__module__)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("cause", _SENTENCES)
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


@pytest.mark.parametrize("cause", _SENTENCES)
def test_a_loop_of_one_s_own_is_advised_without_options(cause: str) -> None:
    assert advice(cause, None) and "--" not in advice(cause, None)


def test_what_a_job_refuses_is_not_advised() -> None:
    with pytest.raises(UsageError, match="not for detectors"):
        detection.Config(compile=True)
    assert re.findall("--[a-z-]+", advice("step-bound", detection.Config())) == ["--batch-size"]


def test_what_is_so_already_is_not_advised() -> None:
    slow = imagenet.Config(precision="fp32", loader="torch")
    faster = "--compile, --precision bf16 or a larger --batch-size for faster steps"
    assert advice("step-bound", slow, device="cuda", steps=200) == faster
    assert "--compile" not in advice("step-bound", slow)  # on CPUs it seldom is faster
    assert re.findall("--[a-z-]+", advice("step-bound", imagenet.Config(compile=True))) == ["--batch-size"]
    assert "--precision" not in advice("step-bound", imagenet.Config(precision="fp16"), device="cuda")
    assert advice("cpu decode", slow).startswith("--loader dali, ")
    assert "--loader" not in advice("cpu decode", imagenet.Config())
    assert "GPUs to decode on" in advice("cpu decode", slow)
    assert "GPUs" not in advice("cpu decode", slow, device="cuda")
    assert mentions(advice("cpu decode", slow, idle=0.3), "30% idle")
    assert "--checkpoint-every" not in advice("checkpoint", imagenet.Config())
    assert "--checkpoint-every" in advice("checkpoint", imagenet.Config(checkpoint_every=5))
    assert "--workers" not in advice("contention", imagenet.Config(), ranks=1)
    assert "--no-ceiling" not in advice("compile", imagenet.Config())
    assert "--epochs" not in advice("short epochs", imagenet.Config(epochs=1))
    assert "--epochs" in advice("short epochs", imagenet.Config())


def test_prepare_is_advised_only_for_data_that_it_accepts() -> None:
    for cause in ("cpu decode", "gpu decode", "gpu contention"):
        assert "`raydali prepare`" in advice(cause, imagenet.Config())
        assert all("prepare" not in advice(cause, options) for options in JOBS[1:])
