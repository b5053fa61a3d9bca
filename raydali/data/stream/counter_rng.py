"""Numbers that depend only on their key: vectorised 64-bit hashing and the uniforms drawn from it.

Everything random about the data (order, crops, flips) comes from here, keyed on (seed, epoch, id), so that it
is the same on every rank, at every world size and after every restart. The mixer is the finaliser of
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, in Stafford's
variant 13), a bijection of 64-bit words whose every output bit depends on every input bit.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

UInt64s = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_THIRTY, _TWENTY_SEVEN, _THIRTY_ONE = np.uint64(30), np.uint64(27), np.uint64(31)
_ELEVEN, _UNIT = np.uint64(11), np.float64(2.0**-53)


def mix(words: UInt64s) -> UInt64s:
    """The words, scrambled one by one (any shape, uint64)."""
    words = (words ^ (words >> _THIRTY)) * _FIRST
    words = (words ^ (words >> _TWENTY_SEVEN)) * _SECOND
    return words ^ (words >> _THIRTY_ONE)


def keyed(*parts: ArrayLike) -> UInt64s:
    """One 64-bit hash for each row of integer parts, broadcast against each other; the order of parts matters."""
    with np.errstate(over="ignore"):
        state = np.zeros((), np.uint64)
        for part in parts:
            state = mix((state ^ np.asarray(part).astype(np.uint64)) + _GOLDEN)
    return state


def uniforms(count: int, *parts: ArrayLike) -> NDArray[np.float64]:
    """`count` independent numbers in [0, 1) for each row of parts: shape (*rows, count)."""
    return (keyed(*[np.expand_dims(part, -1) for part in parts], np.arange(count)) >> _ELEVEN) * _UNIT
