"""The stream of sample ids: one order for the whole run, whatever the number of workers.

    epoch            0                    1
    position   0 1 2 3 4 5 6 7 8 9 | 0 1 2 3 4 5 6 7 8 9        N = 10 samples, E = 2 epochs
    id         7 2 9 0 4 1 8 3 6 5 | 3 8 0 6 1 9 5 2 7 4        a keyed permutation an epoch
    step       |  0    |   1    |  |  2    |   3    |  4 |      G = 4: a global batch may cross the seam
    micro-batch  0 1     2 3        4 5      6 7                batch_size = 2, so A = G / 2 = 2 a global batch

Rank r of W takes micro-batches r, r + W, ... of every global batch. Nothing but the settings and the
number of samples consumed is needed to go on, on any number of workers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raydali.data.stream.class_shares import ClassShares, SampledEpoch, check_alone
from raydali.data.stream.permutation import ApartPermutation, BlockPermutation, Permutation
from raydali.data.stream.repeats import Passes, draw_keys
from raydali.errors import UsageError
from raydali.text import plural


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples that one rank takes at once.

    Attributes:
        step: the global batch that it belongs to, counted from the start of the run.
        index: its place in that global batch, 0..A-1.
        number: its place in the run, step * A + index: the key of what training draws at random.
        ids, epochs: of each sample, int64 (batch_size,); a batch across the seam of epochs has two.
        replaced_by: of each sample, int64 (batch_size,): the id of the substitute of a broken one, -1 where there is
            none; None: for no sample of the batch.
        repeats: of each sample, int64 (batch_size,): how often it came before in its cycle; None: the stream has no
            repeats.
        counts_to: the epoch to which the global batch counts: its record is written next.
        parts: the micro-batches that a loader has joined in this one, in order; their samples are those of this one.
    """

    step: int
    index: int
    number: int
    ids: NDArray[np.int64]
    epochs: NDArray[np.int64]
    replaced_by: NDArray[np.int64] | None = None
    repeats: NDArray[np.int64] | None = None
    counts_to: int = 0
    parts: "tuple[MicroBatch, ...]" = ()

    @property
    def draw_keys(self) -> NDArray[np.int64]:
        """The key, with seed and id, of what each sample draws at random: its epoch and its repeat."""
        return self.epochs if self.repeats is None else draw_keys(self.epochs, self.repeats)

    @property
    def read_ids(self) -> NDArray[np.int64]:
        """The ids that are read: `ids`, with substitutes for broken ones."""
        return self.ids if self.replaced_by is None else np.where(self.replaced_by < 0, self.ids, self.replaced_by)

    @property
    def keys(self) -> list[tuple[int, int]]:
        """The id that is read and the key of its draws, of each sample."""
        return [*zip(self.read_ids.tolist(), self.draw_keys.tolist(), strict=True)]

    @property
    def replaced(self) -> int:
        """The number of samples that are replaced."""
        return 0 if self.replaced_by is None else int((self.replaced_by >= 0).sum())


def joined(parts: Sequence[MicroBatch]) -> MicroBatch:
    """Return consecutive micro-batches as one, to load them together."""
    first, *others = parts
    if not others:
        return first

    def column(of: Callable[[MicroBatch], NDArray[np.int64]]) -> NDArray[np.int64]:
        return np.concatenate([*map(of, parts)])

    return replace(
        first,
        ids=column(lambda part: part.ids),
        epochs=column(lambda part: part.epochs),
        replaced_by=column(lambda part: np.where(part.read_ids == part.ids, -1, part.read_ids)),
        repeats=None if first.repeats is None else np.concatenate([part.repeats for part in parts]),
        parts=tuple(parts),
    )


EpochOrder = Permutation | BlockPermutation | ApartPermutation


class Order(Protocol):
    """An order of samples that a loader follows: a rank's micro-batches from global batch `start` on."""

    @property
    def samples(self) -> int:
        """N, the size of the data set."""
        ...

    def micro_batches(self, rank: int, world_size: int, *, start: int = 0) -> Iterator[MicroBatch]:
        """Yield the rank's micro-batches in order."""
        ...


@dataclass(frozen=True, kw_only=True)
class OrderedPass:
    """The order of validation: every sample exactly once, by id.

    Batches are dealt to the ranks in turn, so some ranks get one more, or none; the last one may be smaller.
    """

    samples: int
    batch_size: int

    def micro_batches(self, rank: int, world_size: int, *, start: int = 0) -> Iterator[MicroBatch]:
        """Yield the rank's batches; a batch holds the same ids at every world size."""
        for step in range(start + rank, -(-self.samples // self.batch_size), world_size):
            ids = np.arange(step * self.batch_size, min((step + 1) * self.batch_size, self.samples))
            yield MicroBatch(step, 0, step, ids, np.zeros_like(ids))


class Once:
    """The order of one micro-batch.

    Args:
        keys: of its samples, see `MicroBatch.keys`.
    """

    def __init__(self, keys: Sequence[tuple[int, int]]) -> None:
        ids, epochs = np.array(keys).T
        self.samples, self._micro_batch = int(ids.max()) + 1, MicroBatch(0, 0, 0, ids, epochs)

    def micro_batches(self, rank: int, world_size: int, *, start: int = 0) -> Iterator[MicroBatch]:  # noqa: ARG002
        """Yield the one micro-batch."""
        yield self._micro_batch


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The order of a run: `epochs` permutations of `samples` ids, cut into full global batches.

    Args:
        samples: N, the size of the data set.
        epochs: E; the less than one global batch that E * N leaves over is never consumed.
        batch_size: samples of a micro-batch, what one device holds at once.
        global_batch_size: G, samples of an optimizer step; a multiple of batch_size.
        seed: key of every order, 0 or more.
        shuffle_block: 0, and an order is a `Permutation` of all samples; else blocks of as many neighbours are
            shuffled, `BlockPermutation`.
        shuffle_window: how many of these blocks are mixed, spread over the data; 0: 16, drawn from anywhere.
        shuffle_apart: whether the micro-batches of a step have blocks of their own, `ApartPermutation`.
        order_batch_size: the batch size with which the run began, a multiple of batch_size. The order stays, and only
            its cut into micro-batches changes. Default: batch_size.
        repeats: K. Above 1, epochs still have N samples, but each id comes K times in a cycle of K epochs, near each
            other and in K different global batches, see repeats.py. Blocks keep their order in all passes.
        class_shares: how many places of an epoch each id has, see class_shares.py. Default: one each.

    Raises:
        UsageError: a size below 1, G or order_batch_size not a multiple of batch_size, fewer samples than G, a negative
            seed, block or window; repeats of fewer than two global batches, or with `shuffle_apart`.
    """

    samples: int
    epochs: int
    batch_size: int
    global_batch_size: int
    seed: int
    shuffle_block: int = 0
    shuffle_window: int = 0
    shuffle_apart: bool = False
    repeats: int = 1
    order_batch_size: int | None = None
    class_shares: ClassShares | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "epochs", "batch_size", "global_batch_size", "repeats"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"seed must be from 0 to 2^63-1, not {self.seed}")
        for name in ("shuffle_block", "shuffle_window"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.global_batch_size % self.batch_size:
            raise UsageError(
                f"global_batch_size must be a multiple of batch_size {self.batch_size}, not {self.global_batch_size}: "
                f"try {-(-self.global_batch_size // self.batch_size) * self.batch_size}"
            )
        if (began := self.order_batch_size or self.batch_size) % self.batch_size:
            raise UsageError(
                f"--batch-size must divide {began}, with which the run began, not be {self.batch_size}: try "
                f"{largest_divisor(began, self.batch_size)}"
            )
        if self.samples < self.global_batch_size:
            raise UsageError(
                f"{plural(self.samples, 'sample')} cannot fill one global batch of {self.global_batch_size}: "
                f"lower --batch-size or --global-batch-size"
            )
        if self.repeats > 1:
            self._check_repeats()
        if self.class_shares is not None:
            check_alone(self.repeats, self.shuffle_block)

    def _check_repeats(self) -> None:
        most = max(1, self.samples // (2 * self.global_batch_size))
        if self.repeats > most:
            raise UsageError(
                f"--repeats {self.repeats} needs {2 * self.repeats} global batches of {self.global_batch_size} an "
                f"epoch, more than {plural(self.samples, 'sample')}: give at most {most}, or a smaller global batch"
            )
        if self.shuffle_block and self.shuffle_apart:
            raise UsageError(
                f"--repeats {self.repeats} and --shuffle-apart exclude each other: give --no-shuffle-apart or leave "
                f"--repeats out"
            )

    @property
    def micro_batches_per_step(self) -> int:
        """A, the number of micro-batches of a global batch."""
        return self.global_batch_size // self.batch_size

    @property
    def steps(self) -> int:
        """The number of global batches of the whole run."""
        return self.epochs * self.samples // self.global_batch_size

    def end_step(self, epoch: int) -> int:
        """Return the number of completed steps at which the epoch's record is written.

        That is the first global batch that reaches the epoch's end, or the run's last one. With fewer than two
        global batches of samples the run may end before its last epoch got a batch of its own.
        """
        return min(-(-(epoch + 1) * self.samples // self.global_batch_size), self.steps)

    def epoch_closed_by(self, step: int) -> int | None:
        """Return the epoch whose record is written after global batch `step`, if any (the later one of two)."""
        if step == self.steps - 1:
            return self.epochs - 1
        epoch = (step + 1) * self.global_batch_size // self.samples - 1
        return epoch if epoch >= 0 and self.end_step(epoch) == step + 1 else None

    def epoch_of(self, step: int) -> int:
        """Return the epoch to which global batch `step` counts: the one whose record is written next."""
        epoch = step * self.global_batch_size // self.samples
        return self.epochs - 1 if self.end_step(epoch) == self.steps else epoch

    def micro_batches_of(self, rank: int, world_size: int) -> int:
        """Return how many micro-batches of each global batch the rank takes.

        Raises:
            UsageError: more ranks than micro-batches, since a rank without one would hold up the others.
        """
        if world_size > self.micro_batches_per_step:
            size = largest_divisor(self.order_batch_size or self.batch_size, self.global_batch_size // world_size)
            remedy = f"give --batch-size {size}" if size else "begin a run with a larger --global-batch-size"
            raise UsageError(
                f"{plural(world_size, 'worker')} cannot share {plural(self.micro_batches_per_step, 'micro-batch')} "
                f"({self.global_batch_size} / {self.batch_size}): lower --workers, or {remedy}"
            )
        return len(range(rank, self.micro_batches_per_step, world_size))

    def order(self, cycle: int) -> EpochOrder:
        """Return the ids of an epoch, or with repeats of a cycle of epochs, by position."""
        return _order(self, cycle)

    def micro_batch(self, step: int, index: int) -> MicroBatch:
        """Return micro-batch `index` of global batch `step`, with its ids."""
        first = step * self.global_batch_size + index * self.batch_size
        samples = np.arange(first, first + self.batch_size)
        cycles, places = np.divmod(samples, self.repeats * self.samples)
        ids, repeats = np.empty_like(samples), np.zeros_like(samples)
        for cycle in np.unique(cycles).tolist():
            here = cycles == cycle
            if self.class_shares is not None:
                ids[here], repeats[here] = _sampled_epoch(self, cycle)(places[here])
                continue
            if self.repeats > 1:
                passes = Passes(self.samples, self.repeats, self.seed, cycle, shuffled=not self.shuffle_block)
                places[here], repeats[here] = passes(places[here])
            ids[here] = self.order(cycle)(places[here])
        return MicroBatch(
            step,
            index,
            step * self.micro_batches_per_step + index,
            ids,
            samples // self.samples,
            repeats=repeats if self.repeats > 1 or self.class_shares is not None else None,
            counts_to=self.epoch_of(step),
        )

    def micro_batches(self, rank: int, world_size: int, *, start: int = 0) -> Iterator[MicroBatch]:
        """Return an iterator of the rank's micro-batches, from global batch `start` to the end of the run."""
        self.micro_batches_of(rank, world_size)
        indices = range(rank, self.micro_batches_per_step, world_size)
        return (self.micro_batch(step, index) for step in range(start, self.steps) for index in indices)

    def state(self, steps: int) -> dict[str, int]:
        """Return the state after `steps` global batches, which checkpoints keep: it is valid at every world size."""
        return {"seed": self.seed, "samples_consumed": steps * self.global_batch_size}

    def steps_of(self, state: dict[str, int]) -> int:
        """Return the number of global batches that a state covers.

        Raises:
            UsageError: the state has another seed, or is inside a global batch: its settings were others.
        """
        if state["seed"] != self.seed:
            raise UsageError(f"the checkpoint's seed is {state['seed']}, this run's is {self.seed}")
        steps, rest = divmod(state["samples_consumed"], self.global_batch_size)
        if rest or steps > self.steps:
            raise UsageError(
                f"the checkpoint's {state['samples_consumed']} samples do not fit global batches of "
                f"{self.global_batch_size} in {plural(self.epochs, 'epoch')}: it was made with other settings"
            )
        return steps


@lru_cache(maxsize=2)
def _sampled_epoch(stream: Stream, epoch: int) -> SampledEpoch:
    assert stream.class_shares is not None
    return SampledEpoch(stream.class_shares, epoch, stream.global_batch_size)


@lru_cache(maxsize=4)
def _order(stream: Stream, cycle: int) -> EpochOrder:
    if not stream.shuffle_block:
        return Permutation(stream.samples, stream.seed, cycle)
    order = BlockPermutation(stream.samples, stream.shuffle_block, stream.seed, cycle, stream.shuffle_window)
    if not stream.shuffle_apart:
        return order
    begin, size = cycle * stream.samples, stream.order_batch_size or stream.batch_size
    return ApartPermutation(order, stream.samples, begin, size, stream.global_batch_size // size)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`; 0 if `most` is below 1."""
    return next((size for size in range(min(most, number), 0, -1) if number % size == 0), 0)
