"""The augmentation of a batch: drawn on the host from (seed, epoch, id), applied to 8-bit images on their device.

    ids, epochs --draw--> plans (N, rows, WIDTH) float32 --apply--> images (N, 3, H, W) uint8
    loader's threads      go to the device with the batch           Triton on a GPU, torch on a CPU

A plan has a row for each operation, chain by chain (operations.py), and a last row: top, left, height and width of the
erased rectangle, then the weights of the original and of each chain of AugMix. Pixels depend on no other sample.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from raydali.data.augment.operations import WIDTH, Floats, Policy, Rows
from raydali.data.augment.policies import parse
from raydali.data.stream.counter_rng import uniforms
from raydali.errors import UsageError

if TYPE_CHECKING:
    import torch

Ids = NDArray[np.int64]
WarpFilter = Literal["bilinear", "nearest"]

_KEY = 0xA06
"""Keeps the uniforms of augmentation apart from the uniforms of crops, which have the same seed, epoch and id."""
ERASE_ATTEMPTS = 10
ERASE_NUMBERS = 2 * ERASE_ATTEMPTS + 3
ERASE_AREA, ERASE_ASPECT = (0.02, 0.33), (0.3, 3.3)


@dataclass(frozen=True)
class Augmentation:
    """A policy, and random erasing after it.

    Args:
        policy: as in `--augment`.
        erase: probability that a rectangle is erased (Zhong et al., AAAI 2020), with torchvision's distribution.
        colour: the mean colour in 0..255, with which rectangles, and in timm's policy corners, are filled.
        warp_filter: the filter of rotations, shears and translations.

    Raises:
        UsageError: the policy is unknown, or the probability is out of its range.
    """

    policy: str = "none"
    erase: float = 0.0
    colour: tuple[int, int, int] = (124, 116, 104)
    warp_filter: WarpFilter = "bilinear"

    def __post_init__(self) -> None:
        _ = self.parsed
        if not 0 <= self.erase <= 1:
            raise UsageError(f"--erase must be from 0 to 1, not {self.erase}")

    @property
    def parsed(self) -> Policy:
        """The policy; without stages if there is none."""
        return parse(self.policy)

    @property
    def fill(self) -> tuple[int, int, int]:
        """The colour outside of warped images."""
        return self.colour if self.parsed.fills_with_mean else (0, 0, 0)

    def __bool__(self) -> bool:
        return bool(self.parsed.stages or self.erase)

    def draw(self, seed: int, epochs: Ids, ids: Ids, side: int) -> Rows:
        """Return the plans (N, chains * slots + 1, WIDTH) of samples (N,), for images of this height and width."""
        policy = self.parsed
        parts = policy.chains * policy.numbers, ERASE_NUMBERS, 2 + policy.chains * (policy.chains > 1)
        of_policy, of_erasing, of_mixing = np.split(
            uniforms(sum(parts), seed, epochs, ids, _KEY), np.cumsum(parts)[:-1], axis=1
        )
        plans = np.zeros((len(ids), policy.chains * policy.slots + 1, WIDTH), np.float32)
        if policy.slots:
            rows = policy.draw(of_policy.reshape(-1, policy.numbers), side)
            plans[:, :-1] = rows.reshape(len(ids), -1, WIDTH)
        if self.erase:
            plans[:, -1, :4] = self._rectangles(of_erasing, side)
        if policy.chains > 1:
            plans[:, -1, 4 : 5 + policy.chains] = _mixing_weights(of_mixing)
        return plans

    def _rectangles(self, uniforms: Floats, side: int) -> Floats:
        """Return top, left, height and width (N, 4) of rectangles; zeros where nothing is erased.

        It is the first of ERASE_ATTEMPTS that is smaller than the image, as in torchvision's `RandomErasing`.
        """
        applied, y, x = uniforms[:, :3].T
        shares, aspects = np.moveaxis(uniforms[:, 3:].reshape(-1, ERASE_ATTEMPTS, 2), -1, 0)
        area = side * side * (ERASE_AREA[0] + (ERASE_AREA[1] - ERASE_AREA[0]) * shares)
        low, high = np.log(ERASE_ASPECT)
        aspect = np.exp(low + (high - low) * aspects)
        sizes = np.rint(np.stack([np.sqrt(area * aspect), np.sqrt(area / aspect)], -1))
        fits = (sizes < side).all(-1)
        size = np.take_along_axis(sizes, fits.argmax(1)[:, None, None], 1)[:, 0]
        starts = np.floor(np.stack([y, x], -1) * (side - size + 1))
        erased = (applied < self.erase) & fits.any(1)
        return np.where(erased[:, None], np.concatenate([starts, size], 1), 0)

    def apply(self, images: "torch.Tensor", plans: "torch.Tensor") -> "torch.Tensor":
        """Return the augmented images.

        Args:
            images: (N, 3, H, W) uint8 in channels-last memory; they are not changed.
            plans: of `draw`, on the same device.
        """
        if images.is_cuda:
            from raydali.data.augment.kernels import augmented
        else:
            from raydali.data.augment.cpu import augmented
        return augmented(
            images,
            plans,
            slots=self.parsed.slots,
            chains=self.parsed.chains,
            fill=self.fill,
            colour=self.colour,
            nearest=self.warp_filter == "nearest",
        )


NO_AUGMENTATION = Augmentation()


def _mixing_weights(uniforms: Floats) -> Floats:
    """Return the weights (N, 1 + chains) of the original and the chains, from uniforms (N, 2 + chains).

    They are the weights of AugMix: a Beta(1, 1) share of the original, and Dirichlet(1, ..., 1) shares of the rest.
    """
    original, exponentials = uniforms[:, :1], -np.log1p(-uniforms[:, 2:])
    return np.concatenate([original, (1 - original) * exponentials / exponentials.sum(1, keepdims=True)], 1)
