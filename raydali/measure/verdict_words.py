"""What a verdict says: the cost in words, and a remedy that can be tried."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What `verdict` found; see Verdict.

    Attributes:
        seconds: of the epoch.
        straggler, others: records of ranks.
        host, taken: where other processes take most of what is computed, and their share.
        idle: share of idle cores on the busiest host.
    """

    kind: str
    cause: str
    cost: float
    gain: float
    steps: int
    seconds: float
    of_ceiling: float | None
    straggler: Mapping[str, Any] | None
    others: Sequence[Mapping[str, Any]]
    host: str
    taken: float
    idle: float | None
    device: str


def said(finding: Finding) -> str:
    """The sentence."""
    headline, what, remedy = _SENTENCES[finding.cause](finding)
    gain = f"; without it epochs are up to {finding.gain:.0%} faster" if finding.cost else ""
    return f"{headline}: {what}{gain}. Try {remedy}"


Words = tuple[str, str, str]
"""Headline, what it costs, what to try."""

_SMALLER = "images stored nearer to --image-size (`raydali prepare`)"


def _loader(by: str, remedy: str) -> Any:
    def words(found: Finding) -> Words:
        return f"loader-bound{by}", f"ranks waited for data for {found.cost:.0%} of the epoch", remedy

    return words


def _python(found: Finding) -> Words:
    held_up = "waited for data or, as one thread at a time runs Python, could not go on with a step"
    remedy = "DALI's operators or numpy over whole batches instead of Python (docs/own-data.md)"
    return "loader-bound by Python", f"for {found.cost:.0%} of the epoch ranks {held_up}", remedy


def _cpu_decode(found: Finding) -> Words:
    more = "--cpus-per-worker with more cores"
    if found.idle is not None and found.idle > 0.2:
        more += f": {found.idle:.0%} of them were idle"
    else:
        more += f", GPUs to decode on, or {_SMALLER}"
    return _loader(" by decoding on the CPU", more)(found)  # type: ignore[no-any-return]


def _step_bound(found: Finding) -> Words:
    faster = "--compile, --precision bf16 or a larger --batch-size for faster steps"
    if found.of_ceiling is None:
        return "step-bound", "no other cost is large; the ceiling was not measured", faster
    return "step-bound", f"{found.of_ceiling:.0%} of the ceiling, and no other cost is large", faster


def _straggler(found: Finding) -> Words:
    late = found.straggler
    assert late is not None
    headline = f"straggler, rank {late['rank']} on node {late['node']}"
    what = f"the others waited for it for {found.cost:.0%} of the epoch"
    own, theirs = late["loader_wait_seconds"], fmean(rank["loader_wait_seconds"] for rank in found.others)
    if own - theirs > 0.5 * found.cost * found.seconds:
        reason = f", and it for its loader ({own:.1f} s, the others {theirs:.1f} s)"
        return headline, what + reason, "`raydali doctor` on that node: its disk, its network, its cores"
    return headline, what + ": its steps are slow", "`raydali doctor` on that node, and what else runs there"


def _contention(found: Finding) -> Words:
    if found.taken > 0.2:
        what = f"other processes took {found.taken:.0%} of what was computed on node {found.host}, no core was left"
        return (
            "contention for cores",
            f"{what}, and that cost {found.cost:.0%} of the epoch",
            ("ending them, or a node of its own"),
        )
    what = f"model and loader have too few, and waited for them for {found.cost:.0%} of the epoch"
    if found.device == "cuda":
        what = f"steps are slower beside the loader than alone, for {found.cost:.0%} of the epoch"
        return "contention for the GPU", what, f"{_SMALLER}, or more --cpus-per-worker"
    return "contention for cores", what, "fewer --workers on a node, or nodes with more cores"


def _slower_steps(found: Finding) -> Words:
    what = f"for {found.cost:.0%} of the epoch, steps took longer than at the ceiling though they had their cores"
    return "slower steps", what, "torch.set_flush_denormal(True): numbers near 0 are slow on CPUs"


def _communication(found: Finding) -> Words:
    what = f"exchanging gradients took {found.cost:.0%} of the epoch even when no rank was late"
    return "communication", what, "a larger --batch-size or --global-batch-size, or a faster network (`raydali doctor`)"


def _start_up(found: Finding) -> Words:
    what = f"the first batch took {found.cost:.0%} of the epoch, once for each start"
    return "start-up", what, "nothing, if later epochs are free of it"


def _compile(found: Finding) -> Words:
    what = f"the first step took {found.cost:.0%} of the epoch longer than the others"
    return "compile", what, "leaving out --no-ceiling, so that it is rehearsed, or --compile, in short runs"


def _validation(found: Finding) -> Words:
    return "validation", f"it took {found.cost:.0%} of the epoch", "fewer validation images: --val-data"


def _checkpoint(found: Finding) -> Words:
    what = f"training waited for checkpoints for {found.cost:.0%} of the epoch"
    return "checkpoints", what, "a higher --checkpoint-every, or faster --storage"


def _short_epochs(found: Finding) -> Words:
    what = f"of {found.seconds:.1f} s, start-up, validation and checkpoint took {found.cost:.0%}"
    return f"short epochs, of {found.steps} steps", what, "fewer --epochs over more images each"


_SENTENCES: dict[str, Any] = {
    "storage": _loader(
        " by storage", "a copy on local disks, more --cpus-per-worker to read with, or --shuffle-block 1024 on disks"
    ),
    "python": _python,
    "cpu decode": _cpu_decode,
    "gpu decode": _loader(" by decoding on the GPU", _SMALLER),
    "loader": _loader("", "more --cpus-per-worker"),
    "step-bound": _step_bound,
    "straggler": _straggler,
    "contention": _contention,
    "slower steps": _slower_steps,
    "communication": _communication,
    "start-up": _start_up,
    "compile": _compile,
    "validation": _validation,
    "checkpoint": _checkpoint,
    "short epochs": _short_epochs,
}
