"""The text of a verdict: the largest cost of an epoch, and one remedy that suits the job and the machine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from raydali.errors import UsageError
from raydali.extras import has_dali
from raydali.host.hardware import COMPILE_PAYS_FROM, fastest_precision
from raydali.measure.costs import Straggler
from raydali.text import plural

AT_CEILING = 0.95
"""From this share of the ceiling on, training counts as fast as its steps alone."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The findings that a verdict describes; see Verdict.

    Attributes:
        cost: share of the epoch that the cause costs.
        largest: the largest cost of training and its kind, even if it is too small for a verdict.
        seconds: duration of the epoch.
        wait: share of the training time for which a rank waited for its loader, without the first batch.
        mutual_wait: share of the training time for which a rank waited in an all-reduce for another rank's loader.
        of_ceiling: share of the ceiling; None if the ceiling is not known.
        ranks, nodes: number of ranks, number of nodes.
        contended_node, foreign_cpu_share: see `costs.contended_node`.
        idle: share of idle cores on the busiest node.
        has_bf16: whether all devices have bf16 units.
        options: the job's options, a dataclass; None for a training loop without a job.
        useful_block: returns a `shuffle_block` that suits the data; 0 if there is none.
    """

    cause: str
    cost: float
    largest: tuple[float, str] | None
    steps: int
    seconds: float
    wait: float
    mutual_wait: float
    of_ceiling: float | None
    ranks: int
    nodes: int
    straggler: Straggler | None
    contended_node: str
    foreign_cpu_share: float
    idle: float | None
    device: str
    has_bf16: bool
    options: Any
    useful_block: Callable[[], int] = lambda: 0

    def takes(self, **change: Any) -> bool:
        """Return whether the job has these options, accepts these values, and does not use them already."""
        try:
            return bool(replace(self.options, **change) != self.options)
        except (TypeError, UsageError):
            return False

    def first(self, *remedies: "Advice | str") -> str:
        """Return the first remedy that applies; empty for none."""
        return next((text for one in remedies if (text := one if isinstance(one, str) else one.to(self))), "")

    def on(self, node: str) -> str:
        """Return " on node NODE", or nothing if there is only one."""
        return f" on node {node}" if self.nodes > 1 else ""


@dataclass(frozen=True)
class Advice:
    """Advice that depends on the options of the job.

    Attributes:
        option: the advice in words.
        change: the changed options; only a job that accepts them gets the advice.
        own: the advice for a training loop without a job; empty for none.
    """

    option: str
    change: dict[str, Any] = field(default_factory=dict)
    own: str = ""

    def to(self, found: Finding) -> str:
        """Return the advice for the job of this finding; empty for none."""
        if found.options is None:
            return self.own
        return self.option if found.takes(**self.change) else ""


def describe(finding: Finding) -> str:
    """Return the text of the verdict."""
    headline, what, remedy = _SENTENCES[finding.cause](finding)
    return f"{headline}: {what}" + f". Try {remedy}" * bool(remedy)


Words = tuple[str, str, str]
"""The headline, the cost, and what to try; an empty text for nothing."""

_COSTS = {
    "loader-bound": "waiting for data",
    "contention": "waiting for cores",
    "gpu contention": "the loader's use of the GPU",
    "start-up": "the first batch",
    "compile": "the first step",
    "checkpoint": "checkpoints",
}
"""Descriptions of costs that are too small for a verdict, if they differ from the name of the kind."""
_ANY = 1 << 20
"""A larger value than any option has."""
_MORE_CORES = Advice("a higher --cpus-per-worker", {"cpus_per_worker": _ANY}, "more cores and threads")


def _smaller(found: Finding) -> str:
    smaller: str = getattr(found.options, "smaller_data", "images stored smaller")
    return smaller


def _waited(found: Finding) -> str:
    """Return how long ranks waited for data, as in the epoch's row, and additionally for each other."""
    who = "ranks" if found.ranks > 1 else "training"
    waited = f"{who} waited {found.wait:.0%} of the time for data"
    return waited + f" and {found.mutual_wait:.0%} for each other's data" * (found.mutual_wait >= 0.005)


def _storage(found: Finding) -> Words:
    block = found.useful_block() if found.options is not None else 0
    say = f"--shuffle-block {block} if the disk is a hard disk, else a faster disk"
    blocks = [Advice(say, {"shuffle_block": block})] * bool(block)
    is_remote = found.nodes > 1 or "://" in str(getattr(found.options, "data", ""))
    copy = "a copy of the data on local disks" if is_remote else ""
    return "loader-bound by storage", _waited(found), found.first(copy, *blocks, "the data on a faster disk")


def _python(found: Finding) -> Words:
    cost = f"ranks waited {found.cost:.0%} of the epoch for Python code of the pipeline"
    return "loader-bound by Python", cost, "DALI's operators or numpy on whole batches (docs/own-data.md)"


def _cpu_decode(found: Finding) -> Words:
    is_slower = getattr(found.options, "loader", None) == "torch" and has_dali()
    dali = [Advice("--loader dali", {"loader": "dali"})] * is_slower
    if found.idle is not None and found.idle > 0.2:
        cores = f": {found.idle:.0%} of cores are idle"
        more = Advice(_MORE_CORES.option + cores, _MORE_CORES.change, _MORE_CORES.own + cores)
        remedy = found.first(*dali, more)
    else:
        remedy = found.first(*dali, _smaller(found))
    return "loader-bound by decoding on the CPU", _waited(found), remedy


def _gpu_decode(found: Finding) -> Words:
    return "loader-bound by decoding on the GPU", _waited(found), _smaller(found)


def _loader(found: Finding) -> Words:
    return "loader-bound", _waited(found), found.first(_MORE_CORES)


def _step_bound(found: Finding) -> Words:
    compiled = Advice("--compile", {"compile": True}, "torch.compile")
    steps = found.steps * getattr(found.options, "epochs", COMPILE_PAYS_FROM)
    half = fastest_precision(found.device, bf16=found.has_bf16)
    is_slow = getattr(found.options, "precision", "fp32") == "fp32"  # bf16 and fp16 are about equally fast
    faster = found.first(
        *([Advice(f"--precision {half}", {"precision": half}, half)] if is_slow and half != "fp32" else []),
        *([compiled] if found.device == "cuda" and steps >= COMPILE_PAYS_FROM else []),
        "more GPUs" if found.device == "cuda" else "a GPU",
    )
    if found.of_ceiling is None:
        what = "no other cost is large, and the ceiling is not known"
    elif found.of_ceiling >= AT_CEILING or found.largest is None:
        what = f"{found.of_ceiling:.0%} of the ceiling, so nothing but the step itself takes time"
    else:
        cost, kind = found.largest
        named = _COSTS.get(kind, kind)
        what = f"{found.of_ceiling:.0%} of the ceiling; the largest other cost, {cost:.0%} of the epoch, is {named}"
    return "step-bound", what, faster


def _straggler(found: Finding) -> Words:
    assert found.straggler is not None
    late, waits = found.straggler.rank, found.straggler.waits
    what = f"the others waited for it {found.cost:.0%} of the epoch, because its steps are slow"
    if waits is not None:
        what = f"its loader made it wait for {waits[0]:.1f} s and the others for {waits[1]:.1f} s"
    where = found.on(late["node"])
    return f"straggler, rank {late['rank']}{where}", what, "`raydali doctor`" + " on that node" * bool(where)


def _contention(found: Finding) -> Words:
    if found.foreign_cpu_share > 0.2:
        used = f"other processes used {found.foreign_cpu_share:.0%} of the CPU time{found.on(found.contended_node)}"
        what = f"{used}, which cost {found.cost:.0%} of the epoch"
        return "CPU contention", what, "nodes of its own" if found.nodes > 1 else "closing other programs"
    what = f"the model and the loader waited for a core {found.cost:.0%} of the epoch"
    fewer = Advice("fewer --workers", own="fewer ranks")
    on_a_node = " on each node" if found.nodes > 1 else ""
    return "CPU contention", what, found.first(fewer) + on_a_node if found.ranks > found.nodes else "more CPU cores"


def _gpu_contention(found: Finding) -> Words:
    what = f"steps are slower while the loader runs, which cost {found.cost:.0%} of the epoch"
    return "GPU contention", what, _smaller(found)


def _slower_steps(found: Finding) -> Words:
    what = f"steps took longer than at the ceiling, which cost {found.cost:.0%} of the epoch, although cores were free"
    return "slower steps", what, "torch.set_flush_denormal(True)"


def _communication(found: Finding) -> Words:
    what = f"all-reduces took {found.cost:.0%} of the epoch although no rank was late"
    larger = Advice("a larger --global-batch-size", {"global_batch_size": _ANY}, "larger global batches")
    return "communication", what, found.first(larger, "a faster network")


def _start_up(found: Finding) -> Words:
    return "start-up", f"the first batch took {found.cost:.0%} of the epoch, as it does once after each start", ""


def _compile(found: Finding) -> Words:
    what = f"the first step took {found.cost:.0%} of the epoch longer than the others, as it does once after each start"
    warmed_up = Advice("leaving out --no-ceiling, so that steps are warmed up", {"ceiling": True})
    return "compile", what, found.first(*([warmed_up] if found.device == "cpu" else []))  # GPUs always warm up


def _validation(found: Finding) -> Words:
    where = " (--val-data)" if found.takes(val_data="fewer") else ""
    return "validation", f"it took {found.cost:.0%} of the epoch", f"fewer validation samples{where}"


def _checkpoint(found: Finding) -> Words:
    what = f"training waited for checkpoints {found.cost:.0%} of the epoch"
    fewer = ["a higher --checkpoint-every"] if getattr(found.options, "checkpoint_every", 0) else []
    faster = Advice("a faster --storage", {"storage": "faster"}, "faster storage")
    return "checkpoints", what, found.first(*fewer, faster)


def _short_epochs(found: Finding) -> Words:
    epoch = f"an epoch of {plural(found.steps, 'step')} in {found.seconds:.1f} s is too short to judge"
    what = f"{epoch}; start-up, validation and checkpoint took {found.cost:.0%} of it"
    return "short epochs", what, ""


_SENTENCES: dict[str, Callable[[Finding], Words]] = {
    "storage": _storage,
    "python": _python,
    "cpu decode": _cpu_decode,
    "gpu decode": _gpu_decode,
    "loader": _loader,
    "step-bound": _step_bound,
    "straggler": _straggler,
    "contention": _contention,
    "gpu contention": _gpu_contention,
    "slower steps": _slower_steps,
    "communication": _communication,
    "start-up": _start_up,
    "compile": _compile,
    "validation": _validation,
    "checkpoint": _checkpoint,
    "short epochs": _short_epochs,
}
