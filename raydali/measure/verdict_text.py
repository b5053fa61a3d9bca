"""What a verdict says: the cost in words, and what can be tried, by options that the job at hand takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raydali.errors import UsageError
from raydali.host.hardware import COMPILE_PAYS_FROM, fastest_precision


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What `verdict` found; see Verdict.

    Attributes:
        seconds: of the epoch.
        ranks: how many.
        straggler: its record, and `waits`: for its loader, where that is why it is late: its seconds and the others'.
        host, taken: where other processes take most of what is computed, and their share.
        idle: share of idle cores on the busiest host.
        has_bf16: whether all devices have units for bf16.
        options: of the job, a dataclass; None: a loop of one's own, which has none.
        useful_block: what `shuffle_block` these data can be shuffled in; 0: none.
    """

    kind: str
    cause: str
    cost: float
    gain: float
    steps: int
    seconds: float
    of_ceiling: float | None
    ranks: int
    straggler: Mapping[str, Any] | None
    waits: tuple[float, float] | None
    host: str
    taken: float
    idle: float | None
    device: str
    has_bf16: bool
    options: Any
    useful_block: Callable[[], int] = lambda: 0

    def takes(self, **change: Any) -> bool:
        """Whether the job has such an option, would take that value, and does not have it already."""
        try:
            return bool(replace(self.options, **change) != self.options)
        except (TypeError, UsageError):
            return False

    def remedy(self, *advice: "Advice | str") -> str:
        """What can be tried of this, in words."""
        words = [given for one in advice if (given := one if isinstance(one, str) else one.to(self))]
        return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]


@dataclass(frozen=True)
class Advice:
    """What is done by an option of a job, or in a loop of one's own.

    Attributes:
        option: in words.
        change: what it does to the options; a job that does not take it is not given the advice.
        own: the same in a loop of one's own; empty for nothing.
    """

    option: str
    change: dict[str, Any] = field(default_factory=dict)
    own: str = ""

    def to(self, found: Finding) -> str:
        """The words for that job; empty for none."""
        if found.options is None:
            return self.own
        return self.option if found.takes(**self.change) else ""


def said(finding: Finding) -> str:
    """The sentence."""
    headline, what, remedy = _SENTENCES[finding.cause](finding)
    gain = f"; without it epochs are up to {finding.gain:.0%} faster" if finding.cost else ""
    return f"{headline}: {what}{gain}. Try {remedy}"


Words = tuple[str, str, str]
"""Headline, what it costs, what to try."""

_ANY = 1 << 20
"""A number that an option is not set to."""
_MORE_CORES = Advice("more --cpus-per-worker", {"cpus_per_worker": _ANY}, "more cores and threads")


def _smaller(found: Finding) -> str:
    smaller: str = getattr(found.options, "smaller_data", "images stored smaller")
    return smaller


def _waited(found: Finding) -> str:
    return f"ranks waited for data for {found.cost:.0%} of the epoch"


def _storage(found: Finding) -> Words:
    mixed = "a stream shuffled in blocks, where neighbours are of many classes"
    block = found.useful_block() if found.options is not None else 0
    blocks = Advice(f"--shuffle-block {block} on disks that turn", {"shuffle_block": block}, mixed)
    reading = Advice("more --cpus-per-worker to read with", {"cpus_per_worker": _ANY}, "more threads to read with")
    return "loader-bound by storage", _waited(found), found.remedy("a copy on local disks", reading, blocks)


def _python(found: Finding) -> Words:
    held_up = "waited for data or, as one thread at a time runs Python, could not go on with a step"
    remedy = "DALI's operators or numpy over whole batches instead of Python (docs/own-data.md)"
    return "loader-bound by Python", f"for {found.cost:.0%} of the epoch ranks {held_up}", remedy


def _cpu_decode(found: Finding) -> Words:
    dali = Advice("--loader dali", {"loader": "dali"})
    idle = found.idle is not None and found.idle > 0.2
    cores = "more cores for each worker" if found.options is None else "--cpus-per-worker with more cores"
    if idle:
        remedy = found.remedy(dali, f"{cores}: {found.idle:.0%} of them were idle")
    else:
        gpus = ["GPUs to decode on"] if found.device == "cpu" else []
        remedy = found.remedy(dali, cores, *gpus, _smaller(found))
    return "loader-bound by decoding on the CPU", _waited(found), remedy


def _gpu_decode(found: Finding) -> Words:
    return "loader-bound by decoding on the GPU", _waited(found), _smaller(found)


def _loader(found: Finding) -> Words:
    return "loader-bound", _waited(found), found.remedy(_MORE_CORES, "a look at what the loader does")


def _step_bound(found: Finding) -> Words:
    compiled = Advice("--compile", {"compile": True}, "torch.compile")
    steps = found.steps * getattr(found.options, "epochs", COMPILE_PAYS_FROM)
    half = fastest_precision(found.device, bf16=found.has_bf16)
    is_slow = getattr(found.options, "precision", "fp32") == "fp32"  # bf16 and fp16 are much alike
    faster = found.remedy(
        *([compiled] if found.device == "cuda" and steps >= COMPILE_PAYS_FROM else []),
        *([Advice(f"--precision {half}", {"precision": half}, half)] if is_slow and half != "fp32" else []),
        Advice("a larger --batch-size", {"batch_size": _ANY}, "larger batches"),
    )
    what = "no other cost is large; the ceiling is not known"
    if found.of_ceiling is not None:
        what = f"{found.of_ceiling:.0%} of the ceiling, and no other cost is large"
    return "step-bound", what, f"{faster} for faster steps"


def _straggler(found: Finding) -> Words:
    late = found.straggler
    assert late is not None
    headline = f"straggler, rank {late['rank']} on node {late['node']}"
    what = f"the others waited for it for {found.cost:.0%} of the epoch"
    if found.waits is None:
        return headline, what + ": its steps are slow", "`raydali doctor` on that node, and what else runs there"
    reason = ", and it for its loader ({:.1f} s, the others {:.1f} s)".format(*found.waits)
    return headline, what + reason, "`raydali doctor` on that node: its disk, its network, its cores"


def _contention(found: Finding) -> Words:
    if found.taken > 0.2:
        what = f"other processes took {found.taken:.0%} of what was computed on node {found.host}"
        cost = f"Ray and the driver among them, and no core was left, which cost {found.cost:.0%} of the epoch"
        return "contention for cores", f"{what}, {cost}", "a node of its own, or more cores"
    what = f"model and loader have too few, and waited for them for {found.cost:.0%} of the epoch"
    fewer = [Advice("fewer --workers on a node", own="fewer ranks on a node")] if found.ranks > 1 else []
    return "contention for cores", what, found.remedy(*fewer, "nodes with more cores")


def _gpu_contention(found: Finding) -> Words:
    what = f"steps are slower beside the loader than alone, for {found.cost:.0%} of the epoch"
    return "contention for the GPU", what, found.remedy(_smaller(found), _MORE_CORES)


def _slower_steps(found: Finding) -> Words:
    what = f"for {found.cost:.0%} of the epoch, steps took longer than at the ceiling though they had their cores"
    return "slower steps", what, "torch.set_flush_denormal(True): numbers near 0 are slow on CPUs"


def _communication(found: Finding) -> Words:
    what = f"exchanging gradients took {found.cost:.0%} of the epoch even when no rank was late"
    larger = Advice("a larger --batch-size or --global-batch-size", {"batch_size": _ANY}, "larger batches")
    return "communication", what, found.remedy(larger, "a faster network (`raydali doctor`)")


def _start_up(found: Finding) -> Words:
    what = f"the first batch took {found.cost:.0%} of the epoch, once for each start"
    return "start-up", what, "nothing, if later epochs are free of it"


def _compile(found: Finding) -> Words:
    what = f"the first step took {found.cost:.0%} of the epoch longer than the others"
    rehearsed = Advice("leaving out --no-ceiling, so that it is rehearsed", {"ceiling": True})
    on_cpu = [rehearsed] if found.device == "cpu" else []  # on a GPU it is in any case
    return "compile", what, found.remedy(*on_cpu, "nothing, if later epochs are free of it")


def _validation(found: Finding) -> Words:
    fewer = "fewer validation images" + (": --val-data" if found.takes(val_data="fewer") else "")
    return "validation", f"it took {found.cost:.0%} of the epoch", fewer


def _checkpoint(found: Finding) -> Words:
    what = f"training waited for checkpoints for {found.cost:.0%} of the epoch"
    every = getattr(found.options, "checkpoint_every", 0)
    epochs = Advice("fewer --epochs over more images each", {"epochs": 1}, "fewer of them")
    fewer = "a higher --checkpoint-every" if every else epochs
    return "checkpoints", what, found.remedy(fewer, Advice("faster --storage", {"storage": "faster"}, "faster storage"))


def _short_epochs(found: Finding) -> Words:
    what = f"of {found.seconds:.1f} s, start-up, validation and checkpoint took {found.cost:.0%}"
    fewer = Advice("fewer --epochs over more images each", {"epochs": 1}, "fewer epochs over more images each")
    return f"short epochs, of {found.steps} steps", what, found.remedy(fewer, "a look at runs over more images")


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
