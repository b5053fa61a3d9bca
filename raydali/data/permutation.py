"""A keyed pseudorandom permutation of 0..N-1 that costs no memory: a Feistel network with cycle walking.

Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002). The domain is the smallest power of two
that holds N, its bits split into a left and a right part that take turns to be XORed with a keyed hash of the
other; an image outside 0..N-1 is sent round again, fewer than two rounds a number on average. And one of blocks, made
of several of these.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raydali.data.hashing import UInt64s, keyed, mix

# Position against id is uniform from 8 rounds on; whole orders of five or six samples only from about 20.
_ROUNDS = 24
WINDOW_BLOCKS = 16
"""How many blocks of neighbours a BlockPermutation mixes with each other."""


class Permutation:
    """The order of one epoch: `Permutation(size, seed, epoch)(positions)` are the ids at these positions.

    Args:
        size: N, the number of samples, at least 1.
        seed, epoch: the key; another of either is another order.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least 1 element, not {size}")
        bits = (size - 1).bit_length()
        self.size = size
        self._right_bits = np.uint64((bits + 1) // 2)
        self._right_mask = np.uint64((1 << ((bits + 1) // 2)) - 1)
        self._left_mask = np.uint64((1 << (bits // 2)) - 1)
        self._keys = keyed(seed, epoch, np.arange(_ROUNDS))

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Ids (int64, the shape of positions) at positions in 0..N-1."""
        words = np.asarray(positions).astype(np.uint64)
        ids = np.asarray(self._scramble(words))  # numpy makes a scalar of a single position
        while (outside := ids >= self.size).any():
            ids[outside] = self._scramble(ids[outside])
        return ids.astype(np.int64)

    def _scramble(self, words: UInt64s) -> UInt64s:
        left, right = words >> self._right_bits, words & self._right_mask
        with np.errstate(over="ignore"):
            for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
                left = left ^ (mix(right + even) & self._left_mask)
                right = right ^ (mix(left + odd) & self._right_mask)
        return (left << self._right_bits) | right


class BlockPermutation:
    """The order of one epoch for slow disks: neighbours in it are close to each other on the disk as well.

    Blocks of neighbouring ids are put in random order, then the ids of WINDOW_BLOCKS blocks at a time:

        ids        0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13        size = 14, block = 4: the last one is short
        in blocks  8 9 10 11 | 12 13 | 0 1 2 3 | 4 5 6 7
        in windows 9 0 11 13 8 12 10 1 | 5 3 6 2 7 4            here of 2 blocks

    An order is thus less random: an id is about as likely at any position, but two of a block are never far apart.

    Args:
        size: N, the number of samples, at least 1.
        block: ids of a block, at least 1; from N on this is a plain permutation.
        seed, epoch: the key; another of either is another order.
    """

    def __init__(self, size: int, block: int, seed: int, epoch: int) -> None:
        if size < 1 or block < 1:
            raise ValueError(f"a permutation needs at least 1 element and blocks of 1, not {size} and {block}")
        self.size, self._block, self._key = size, block, (seed, epoch)
        self._whole, self._short = divmod(size, block)
        self._blocks = Permutation(max(1, self._whole), seed, epoch)
        # Behind how many whole blocks the short one comes.
        self._short_at = int(keyed(seed, epoch, _ROUNDS) % np.uint64(self._whole + 1)) * block
        self._window = WINDOW_BLOCKS * block

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Ids (int64, the shape of positions) at positions in 0..N-1."""
        asked = np.asarray(positions, np.int64)
        windows, places = np.divmod(asked.reshape(-1), self._window)
        for window in np.unique(windows).tolist():
            here, begin = windows == window, window * self._window
            permutation = _window(min(self._window, self.size - begin), *self._key, window)
            places[here] = begin + permutation(places[here])
        behind = places - self._short_at
        in_short = (behind >= 0) & (behind < self._short)
        blocks, rest = np.divmod(np.where(in_short, 0, places - self._short * (behind >= self._short)), self._block)
        ids = np.where(in_short, self._whole * self._block + behind, self._blocks(blocks) * self._block + rest)
        return ids.reshape(asked.shape)


@lru_cache(maxsize=8)
def _window(size: int, seed: int, epoch: int, window: int) -> Permutation:
    return Permutation(size, int(keyed(seed, epoch, _ROUNDS + 1, window)), epoch)
