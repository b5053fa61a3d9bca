"""A keyed pseudorandom permutation of 0..N-1 that needs no memory: a Feistel network with cycle walking.

Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002). The domain is the smallest power of two
that holds N, its bits split into a left and a right part that take turns to be XORed with a keyed hash of the
other; an image outside 0..N-1 is sent round again, fewer than two rounds a number on average. And ones of blocks, made
of several of these, for data that is read in blocks.
"""

from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raydali.data.stream.counter_rng import UInt64s, keyed, mix

# Position against id is uniform from 8 rounds on; whole orders of five or six samples only from about 20.
_ROUNDS = 24
TABLED = 1 << 17
"""Maximum size of a permutation that is kept as a table: all 60,000 ids cost as much as 10 batches of 512."""
WINDOW_BLOCKS = 16
"""Default number of blocks of neighbours that a BlockPermutation mixes with each other."""


class Permutation:
    """The order of one epoch: `Permutation(size, seed, epoch)(positions)` are the ids at these positions.

    Args:
        size: N, the number of samples, at least 1.
        seed, epoch: the key; another of either is another order.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least 1 element, not {size}")
        self.size = size
        self._keys = keyed(seed, epoch, np.arange(_ROUNDS))

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Ids (int64, the shape of positions) at positions in 0..N-1."""
        if self.size <= TABLED:
            return np.asarray(self._table[np.asarray(positions)])
        return _permuted(np.asarray(positions), self.size, self._keys)

    @cached_property
    def _table(self) -> NDArray[np.int64]:
        return _permuted(np.arange(self.size), self.size, self._keys)


def _permuted(positions: NDArray[np.int64], size: int, keys: UInt64s) -> NDArray[np.int64]:
    """Numbers of 0..size-1, permuted by keys (rounds,), or each by its own (rounds, *positions.shape)."""
    bits = (size - 1).bit_length()
    right_bits = np.uint64((bits + 1) // 2)
    right_mask, left_mask = np.uint64((1 << ((bits + 1) // 2)) - 1), np.uint64((1 << (bits // 2)) - 1)

    def scramble(words: UInt64s, keys: UInt64s) -> UInt64s:
        left, right = words >> right_bits, words & right_mask
        with np.errstate(over="ignore"):
            for even, odd in zip(keys[::2], keys[1::2], strict=True):
                left = left ^ (mix(right + even) & left_mask)
                right = right ^ (mix(left + odd) & right_mask)
        return (left << right_bits) | right

    ids = np.asarray(scramble(positions.astype(np.uint64), keys))  # numpy makes a scalar of a single position
    while (outside := ids >= size).any():
        ids[outside] = scramble(ids[outside], keys if keys.ndim == 1 else keys[:, outside])
    return ids.astype(np.int64)


class BlockPermutation:
    """The order of one epoch for slow disks: neighbours in it are close to each other on the disk as well.

    Blocks of neighbouring ids are put in random order, then the ids of some blocks, a window, at a time:

        ids        0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13        size = 14, block = 4: the last one is short
        in blocks  8 9 10 11 | 12 13 | 0 1 2 3 | 4 5 6 7
        in windows 9 0 11 13 8 12 10 1 | 5 3 6 2 7 4            here of 2 blocks

    An order is thus less random: an id is about as likely at any position, but two of a block are never far apart.

    Args:
        size: N, the number of samples, at least 1.
        block: ids of a block, at least 1; from N on this is a plain permutation.
        seed, epoch: the key; another of either is another order.
        window: blocks of a window, about as many, spread over the data: where it is sorted, each window holds all of
            it. 0: WINDOW_BLOCKS, drawn from anywhere.
    """

    def __init__(self, size: int, block: int, seed: int, epoch: int, window: int = 0) -> None:
        if size < 1 or block < 1 or window < 0:
            raise ValueError(
                f"a permutation needs at least 1 element and blocks of 1, not {size} and {block} (windows of {window})"
            )
        self.size, self._block, self._key = size, block, (seed, epoch)
        self._whole, self._short = divmod(size, block)
        blocks = max(1, self._whole)
        self._spread = _SpreadBlocks(blocks, window, seed, epoch) if window else None
        self._blocks = self._spread or Permutation(blocks, seed, epoch)
        # Behind how many whole blocks the short one comes.
        self._short_at = int(keyed(seed, epoch, _ROUNDS) % np.uint64(self._whole + 1)) * block

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Ids (int64, the shape of positions) at positions in 0..N-1."""
        asked = np.asarray(positions, np.int64)
        places = asked.reshape(-1).copy()
        windows = self._windows(places)
        for window in np.unique(windows).tolist():
            here, begin = windows == window, self._begin(window)
            permutation = _window(self._begin(window + 1) - begin, *self._key, window)
            places[here] = begin + permutation(places[here] - begin)
        behind = places - self._short_at
        in_short = (behind >= 0) & (behind < self._short)
        blocks, rest = np.divmod(np.where(in_short, 0, places - self._short * (behind >= self._short)), self._block)
        ids = np.where(in_short, self._whole * self._block + behind, self._blocks(blocks) * self._block + rest)
        return ids.reshape(asked.shape)

    def _windows(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._spread is None:
            return places // (WINDOW_BLOCKS * self._block)
        return self._spread.windows((places - np.clip(places - self._short_at, 0, self._short)) // self._block)

    def _begin(self, window: int) -> int:
        """The first place of a window, or N."""
        if self._spread is None:
            return min(window * WINDOW_BLOCKS * self._block, self.size)
        begin = self._spread.begin(window) * self._block
        return self.size if window == self._spread.count else begin + self._short * (begin > self._short_at)


class _SpreadBlocks:
    """An order of blocks in which each window has its blocks from all over the data.

        blocks    0 1 2 | 3 4 5 | 6 7 8 | 9 10          B = 11 blocks in windows of 4, so W = 3 windows
        windows   2 3 7 | 0 5 8 9 | 1 4 6 10            each takes one of each W neighbours, and one of the rest or none

    Args:
        blocks: B.
        window: blocks of a window, at least 1; as many as B / W comes to.
        seed, epoch: the key.

    Attributes:
        count: W.
    """

    def __init__(self, blocks: int, window: int, seed: int, epoch: int) -> None:
        self.count, self._of, self._key = -(-blocks // window), blocks, (seed, epoch)
        self._each, rest = divmod(blocks, self.count)
        self._rest = Permutation(max(1, rest), *self._key)
        # Which windows get one of the rest.
        self._shift = int(keyed(*self._key, _ROUNDS + 3) % np.uint64(self.count))

    def begin(self, window: int) -> int:
        """Return the number of blocks before a window."""
        return (window * self._of + self._shift) // self.count

    def windows(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The windows of positions in the order; positions after the last block belong to the last window."""
        return ((np.minimum(slots, self._of - 1) + 1) * self.count - self._shift - 1) // self._of

    def __call__(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The blocks at these places of the order."""
        windows = self.windows(slots)
        groups = slots - (windows * self._of + self._shift) // self.count
        keys = keyed(*self._key, _ROUNDS + 2, groups, np.arange(_ROUNDS)[:, None])
        of_group = _permuted(windows, self.count, keys)
        of_rest = self._rest(np.minimum((windows * self._rest.size + self._shift) // self.count, self._rest.size - 1))
        return groups * self.count + np.where(groups < self._each, of_group, of_rest)


class ApartPermutation:
    """The order of one epoch in which the micro-batches of a step never share a stretch of another order.

        order      a b c d e f g h i j      an epoch of 10 samples, micro-batches of 2, two of them in a step
        positions  a b f g c d h i e j      the first ones of all steps go through a..e, the second ones through f..j

    A rank that takes some micro-batches of each step thus takes whole stretches, whatever the number of ranks.

    Args:
        order: the other order.
        size: N, the number of samples.
        begin: the samples of the run before this epoch.
        batch_size: samples of a micro-batch.
        lanes: micro-batches of a step.
    """

    def __init__(self, order: BlockPermutation, size: int, begin: int, batch_size: int, lanes: int) -> None:
        self._order, self._begin, self._batch_size, self._lanes = order, begin, batch_size, lanes
        first, last = (self._before(np.int64(end), np.arange(lanes)) for end in (begin, begin + size))
        self._starts = np.cumsum(last - first) - last

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Ids (int64, the shape of positions) at positions in 0..N-1."""
        samples = np.asarray(positions, np.int64) + self._begin
        lanes = samples // self._batch_size % self._lanes
        return self._order(self._starts[lanes] + self._before(samples, lanes))

    def _before(self, samples: NDArray[np.int64] | np.int64, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of so many first samples of the run belong to these lanes."""
        steps, rest = np.divmod(samples, self._batch_size * self._lanes)
        return steps * self._batch_size + np.clip(rest - lanes * self._batch_size, 0, self._batch_size)


@lru_cache(maxsize=8)
def _window(size: int, seed: int, epoch: int, window: int) -> Permutation:
    return Permutation(size, int(keyed(seed, epoch, _ROUNDS + 1, window)), epoch)
