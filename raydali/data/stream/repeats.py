"""Repeated augmentation: each id comes K times, in K different global batches.

    cycle    K epochs of N samples share one order of N ids                       N = 12, K = 2
    windows  a b c d e f | g h i j k l                                            N / K ids each
    passes   a b c d e f, b c a f d e | g h i j k l, i g h j l k                  K over each window

Each further pass shuffles both halves of its window anew. So an id comes again after more than half of a window.

Hoffer et al., "Augment your batch: improving generalization through instance repetition" (CVPR 2020).
"""

import numpy as np
from numpy.typing import NDArray

from raydali.data.stream.counter_rng import keyed
from raydali.data.stream.permutation import Permutation

_SALT = 0x4E9EA75
"""Separates the keys of passes from the keys of epochs."""
_REPEAT_BIT = 32


def draw_keys(epochs: NDArray[np.int64], repeats: NDArray[np.int64]) -> NDArray[np.int64]:
    """The epochs as keys of random draws: with the repeat from bit 32 on, so that repeat 0 draws as without repeats."""
    return epochs | repeats << _REPEAT_BIT


class Passes:
    """The passes of one cycle: `passes(samples)` are the positions in its order, and the repeats, of its samples.

    Where K does not divide N, the windows differ by one id, and fewer than K samples of a window come before the
    epoch that has its others.

    Args:
        size: N, the number of ids.
        count: K, the number of passes over each window, at most N.
        seed, cycle: the key.
        shuffled: whether further passes have orders of their own; False: they have the order of the first.
    """

    def __init__(self, size: int, count: int, seed: int, cycle: int, *, shuffled: bool) -> None:
        self._size, self._count, self._key, self._shuffled = size, count, (seed, cycle), shuffled

    def __call__(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions in 0..N-1 and repeats in 0..K-1 (int64, the shape of `samples`) of samples in 0..K*N-1."""
        windows = ((samples // self._count + 1) * self._count - 1) // self._size
        begins = windows * self._size // self._count
        sizes = (windows + 1) * self._size // self._count - begins
        repeats, places = np.divmod(samples - begins * self._count, sizes)
        if self._shuffled:
            halves = places >= sizes // 2
            begins = begins + halves * (sizes // 2)
            sizes, places = np.where(halves, sizes - sizes // 2, sizes // 2), places - halves * (sizes // 2)
            groups = (windows * self._count + repeats) * 2 + halves
            for group in np.unique(groups[repeats > 0]):
                here = groups == group
                order = Permutation(int(sizes[here][0]), int(keyed(_SALT, *self._key, group)), 0)
                places[here] = order(places[here])
        return begins + places, repeats
