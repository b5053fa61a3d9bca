"""The text of a verdict: the cost in words, and what to try, as options that the job at hand has."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from raydali.errors import UsageError
from raydali.host.hardware import COMPILE_PAYS_FROM, fastest_precision
from raydali.measure.costs import Straggler


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The findings that a verdict describes; see Verdict.

    Attributes:
        seconds: duration of the epoch.
        ranks: the number of ranks.
        contended_node, foreign_cpu_share: see `costs.contended_node`.
        idle: share of idle cores on the busiest node.
        has_bf16: whether all devices have units for bf16.
        options: the job's, a dataclass; None for a loop of one's own.
        useful_block: returns a `shuffle_block` that suits the data; 0: none.
    """

    kind: str
    cause: str
    cost: float
    gain: float
    steps: int
    seconds: float
    of_ceiling: float | None
    ranks: int
    straggler: Straggler | None
    contended_node: str
    foreign_cpu_share: float
    idle: float | None
    device: str
    has_bf16: bool
    options: Any
    useful_block: Callable[[], int] = lambda: 0

    def takes(self, **change: Any) -> bool:
        """Return whether the job has such an option, accepts that value, and does not use it already."""
        try:
            return bool(replace(self.options, **change) != self.options)
        except (TypeError, UsageError):
            return False

    def remedy(self, *advice: "Advice | str") -> str:
        """Return the advice that applies, in words."""
        words = [given for one in advice if (given := one if isinstance(one, str) else one.to(self))]
        return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]


@dataclass(frozen=True)
class Advice:
    """Advice that depends on the options of the job.

    Attributes:
        option: the advice in words.
        change: the changed options; a job that does not accept them is not given the advice.
        own: the advice for a loop of one's own; empty for none.
    """

    option: str
    change: dict[str, Any] = field(default_factory=dict)
    own: str = ""

    def to(self, found: Finding) -> str:
        """Return the words for that job; empty for none."""
        if found.options is None:
            return self.own
        return self.option if found.takes(**self.change) else ""


def describe(finding: Finding) -> str:
    """Return the text of the verdict."""
    headline, what, remedy = _SENTENCES[finding.cause](finding)
    gain = f"; without it epochs would be up to {finding.gain:.0%} faster" if finding.cost else ""
    return f"{headline}: {what}{gain}. Try {remedy}"


Words = tuple[str, str, str]
"""The headline, what it costs, and what to try."""

_ANY = 1 << 20
"""A value that no option has."""
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
    cost = f"for {found.cost:.0%} of the epoch ranks waited for data, or for their turn to run Python"
    remedy = "DALI's operators or numpy over whole batches instead of Python (docs/own-data.md)"
    return "loader-bound by Python", cost, remedy


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
    assert found.straggler is not None
    late = found.straggler.rank
    headline = f"straggler, rank {late['rank']} on node {late['node']}"
    what = f"the others waited for it for {found.cost:.0%} of the epoch"
    if found.straggler.waits is None:
        return headline, what + ": its steps are slow", "`raydali doctor` on that node, and what else runs there"
    reason = ", and it waited for its loader ({:.1f} s, the others {:.1f} s)".format(*found.straggler.waits)
    return headline, what + reason, "`raydali doctor` on that node: its disk, its network, its cores"


def _contention(found: Finding) -> Words:
    if found.foreign_cpu_share > 0.2:
        used = f"other processes used {found.foreign_cpu_share:.0%} of node {found.contended_node}'s CPU time"
        return "CPU contention", f"{used}, costing {found.cost:.0%} of the epoch", "a node of its own, or more cores"
    what = f"model and loader have too few cores, and waited for them for {found.cost:.0%} of the epoch"
    fewer = [Advice("fewer --workers on a node", own="fewer ranks on a node")] if found.ranks > 1 else []
    return "CPU contention", what, found.remedy(*fewer, "nodes with more cores")


def _gpu_contention(found: Finding) -> Words:
    what = f"steps are slower while the loader runs than without it, costing {found.cost:.0%} of the epoch"
    return "GPU contention", what, found.remedy(_smaller(found), _MORE_CORES)


def _slower_steps(found: Finding) -> Words:
    what = f"steps took longer than at the ceiling although they had their cores, costing {found.cost:.0%} of the epoch"
    return "slower steps", what, "torch.set_flush_denormal(True): numbers near 0 are slow on CPUs"


def _communication(found: Finding) -> Words:
    what = f"all-reduces took {found.cost:.0%} of the epoch although no rank was late"
    larger = Advice("a larger --batch-size or --global-batch-size", {"batch_size": _ANY}, "larger batches")
    return "communication", what, found.remedy(larger, "a faster network (`raydali doctor`)")


def _start_up(found: Finding) -> Words:
    what = f"the first batch took {found.cost:.0%} of the epoch, once for each start"
    return "start-up", what, "ignoring it, if later epochs are free of it"


def _compile(found: Finding) -> Words:
    what = f"the first step took longer than the others, costing {found.cost:.0%} of the epoch"
    warmed_up = Advice("leaving out --no-ceiling, so that steps are warmed up", {"ceiling": True})
    on_cpu = [warmed_up] if found.device == "cpu" else []  # on a GPU they always are
    return "compile", what, found.remedy(*on_cpu, "ignoring it, if later epochs are free of it")


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
