"""Compares the ranks of a run before each checkpoint; if they differ, the run goes back to the last one.

Weights and states of optimizers must be equal on all ranks, bit for bit: gradients are summed over ranks once, and each
rank applies the sums to the same weights. Of sharded copies, the ranks with the same shard must be equal. Buffers are
not compared: statistics are those of a rank's own batches.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from raydali.errors import DivergedError, NodeError
from raydali.host.facts import gpu_serial, versions
from raydali.host.hardware import cpu_facts
from raydali.launch.worker.session import Session
from raydali.run.events import RanksDiffer
from raydali.training.checkpoint_file import INTEGERS, local, tensors_in
from raydali.training.worker import Worker


class RankComparison:
    """The comparison on one rank. All ranks must call the same methods.

    Args:
        compares: whether to compare at all, if there are several copies of the weights.
        shards: number of ranks over which each copy is sharded, in the order of ranks.
    """

    def __init__(self, session: Session, compares: bool, shards: int = 1) -> None:
        self._session, self._worker, self._shards = session, session.worker, shards
        self._compares = compares and self._worker.world_size > shards
        self._before: dict[str, Any] = {}

    def resume(self, events: Iterable[dict[str, Any]]) -> None:
        """Take the newest difference from the events on rank 0; the steps before it may be computed again now."""
        if self._compares:
            differences = [row for row in events if row["event"] == RanksDiffer.event]
            self._before = self._worker.from_first(differences[-1] if differences else {})

    def checksum(self, parts: Iterable[object]) -> torch.Tensor | None:
        """Begin to compute the checksum of the modules and optimizers among these; None without a comparison."""
        return checksum(parts, self._worker.device) if self._compares else None

    def check(self, mine: torch.Tensor | None, step: int) -> None:
        """Check that this checksum is that of all ranks after a step.

        Raises:
            NodeError: this rank is wrong, or computing the step again has told that one on this node was.
            RuntimeError: another rank is wrong, or nothing tells which.
            DivergedError: ranks differ as they did when this step was computed before.
        """
        if mine is None:
            return
        worker, shards = self._worker, self._shards
        before = self._before if self._before.get("step") == step and not self._before.get("recomputed") else {}
        checksums = worker.exchange(int(mine))
        of_shards = [checksums[shard::shards] for shard in range(shards)]
        right: list[int | None]
        if is_equal := all(len({*each}) == 1 for each in of_shards):
            if not before or before["odd"]:
                return
            checksums, ranks = before["checksums"], before["ranks"]
            right = [now if now in checksums[shard::shards] else None for shard, (now, *_) in enumerate(of_shards)]
        else:
            ranks, kinds = zip(*worker.exchange(_described(worker)), strict=True)
            if len({*kinds}) > 1:  # they may compute differently
                self._compares = False
                if worker.rank == 0:
                    self._session.warn("ranks with different devices or versions have different weights: not compared")
                return
            right = [*map(majority, of_shards)]
        odd = [rank for rank, each in enumerate(checksums) if right[rank % shards] not in (None, each)]
        if is_equal and not odd:
            return
        named = " and ".join(ranks[rank] for rank in odd)
        which = f"those of {named} are wrong" if odd else "nothing tells which are right"
        text = f"ranks {'had' if is_equal else 'have'} different weights or momenta after step {step}: {which}"
        difference = RanksDiffer(step=step, checksums=checksums, ranks=ranks, odd=odd, recomputed=is_equal, text=text)
        self._session.emit_once(difference)
        is_wrong = f"node {worker.node}," in named if is_equal else worker.rank in odd
        if is_equal and all(worker.exchange(is_wrong)):  # there is no other node
            return
        self._session.checkpoints.wait()  # until the last one is written
        worker.barrier()
        if before and not is_equal:
            same = {before["ranks"][rank] for rank in before["odd"]} & {ranks[rank] for rank in odd}
            why = "take its device away" if same else "rather software that differs from rank to rank than a bad device"
            raise DivergedError(f"{text}, twice in a row: {why}, or give --no-compare-ranks to train on regardless")
        if is_wrong:
            raise NodeError(text)
        if odd:
            worker.barrier()  # until the wrong rank has ended the group, as the driver judges by the first error
        raise RuntimeError(text)


@torch.no_grad()
def checksum(parts: Iterable[object], device: torch.device) -> torch.Tensor:
    """Return a checksum of this rank's weights and optimizer states, int64 (), for which the host does not wait.

    Bits are summed as integers in each tensor, and the sums with odd factors, modulo 2**64. So the order of additions
    does not matter, and a flipped bit always shows: it changes the checksum by an odd multiple of a power of 2.
    """
    tensors = (local(tensor) for part in parts for tensor in _compared(part))
    # Some optimizers count their steps on the CPU.
    sums = [_integers(tensor).sum(dtype=torch.int64).to(device, non_blocking=True) for tensor in tensors]
    return (torch.stack(sums) * torch.arange(1, 2 * len(sums), 2, device=device)).sum()


def _compared(part: object) -> Iterator[torch.Tensor]:
    if isinstance(part, nn.Module):
        yield from part.parameters()
    elif isinstance(part, Optimizer):
        for group in part.param_groups:  # in the order of parameters, which is that of all ranks
            yield from tensors_in([part.state.get(parameter, {}) for parameter in group["params"]])


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers (N,), of 64 bits if possible, since a sum copies others; else no copy."""
    flat = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).reshape(-1).contiguous()
    size = flat.itemsize
    is_whole = flat.numel() * size % 8 == flat.storage_offset() * size % 8 == 0
    return flat.view(torch.int64 if is_whole else INTEGERS[size])


def majority(checksums: Sequence[int]) -> int | None:
    """Return the checksum that most ranks have; None if none has a majority."""
    most, count = Counter(checksums).most_common(1)[0]
    return most if 2 * count > len(checksums) else None


def _described(worker: Worker) -> tuple[str, str]:
    """Return a rank in words, and what its arithmetic depends on."""
    device, serial = cpu_facts().get("model name") or "CPU", ""
    if worker.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(worker.device)
        device, serial = gpu.name, f", {gpu_serial(str(gpu.uuid))}"
    return f"rank {worker.rank} (node {worker.node}, {device}{serial})", f"{device} {versions()}"
