"""A keyed pseudorandom permutation of 0..N-1 that costs no memory: a Feistel network with cycle walking.

Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002). The domain is the smallest power of two
that holds N, its bits split into a left and a right part that take turns to be XORed with a keyed hash of the
other; an image outside 0..N-1 is sent round again, fewer than two rounds a number on average.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raydali.data.hashing import UInt64s, keyed, mix

# Position against id is uniform from 8 rounds on; whole orders of five or six samples only from about 20.
_ROUNDS = 24


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
