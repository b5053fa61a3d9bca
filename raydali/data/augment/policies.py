"""The augmentation policies by name: `parse` makes the policy of `--augment` out of stages.

Ranges and probabilities are as in `torchvision.transforms.v2`, or as in timm or DeiT where they are named.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from raydali.data.augment.operations import (
    BINS,
    Floats,
    Operation,
    Policy,
    Stage,
    continuous,
    in_random_order,
    one_of,
    up_to,
)
from raydali.errors import UsageError


def _signed(most: float, *names: str) -> list[Operation]:
    return [Operation(name, lambda level, side: most * level, signed=True) for name in names]


def _shifts(share: float = 0.0, pixels: float = 0.0) -> list[Operation]:
    """Return signed translations by whole pixels, at most this share of the side and this number of pixels."""
    return [
        Operation(name, lambda level, side: np.trunc((share * side + pixels) * level), signed=True)
        for name in ("TranslateX", "TranslateY")
    ]


def _fixed(operation: Operation, probability: float, level: float) -> Operation:
    """Return the operation at one level."""
    magnitude = operation.magnitude
    return replace(
        operation, probability=probability, magnitude=lambda levels, side: magnitude(levels * 0 + level, side)
    )


SHEAR, ENHANCE = ("ShearX", "ShearY"), ("Brightness", "Color", "Contrast", "Sharpness")
SOLARIZE = Operation("Solarize", lambda level, side: 1 - level)
OF_STATISTICS = Operation("AutoContrast"), Operation("Equalize")


def _moderate(shift: float, bits: int) -> tuple[Operation, ...]:
    """Return operations that shift by at most this share of the side, and keep this number of bits or up to 4 fewer."""
    return (
        *_signed(0.3, *SHEAR),
        *_shifts(shift),
        *_signed(30, "Rotate"),
        *_signed(0.9, *ENHANCE),
        Operation("Posterize", lambda level, side: np.rint(bits - 4 * level)),
        SOLARIZE,
        *OF_STATISTICS,
    )


WIDE = (
    Operation("Identity"),
    *_signed(0.99, *SHEAR, *ENHANCE),
    *_shifts(pixels=32),
    *_signed(135, "Rotate"),
    Operation("Posterize", lambda level, side: np.rint(8 - 6 * level)),
    SOLARIZE,
    *OF_STATISTICS,
)
"""The operations of TrivialAugmentWide (Müller and Hutter, ICCV 2021)."""
RAND = Operation("Identity"), *_moderate(150 / 331, 8)
"""The operations of RandAugment (Cubuk et al., NeurIPS 2020), and of AutoAugment, which has Invert instead of
Identity."""
AUGMIX = _moderate(1 / 3, 4)
"""The operations of AugMix (Hendrycks et al., ICLR 2020)."""
AUGMIX_SEVERITY, AUGMIX_LEVELS, AUGMIX_CHAINS, AUGMIX_DEPTH = 3, 10, 3, 3

TIMM = (
    *OF_STATISTICS,
    Operation("Invert"),
    *_signed(30, "Rotate"),
    Operation("Posterize", lambda level, side: 4 - np.floor(4 * level)),
    Operation("Solarize", lambda level, side: (256 - np.floor(256 * level)) / 255),
    Operation("SolarizeAdd", lambda level, side: np.floor(110 * level)),
    *_signed(0.9, *ENHANCE),
    *_signed(0.3, *SHEAR),
    *(Operation(name, lambda level, side: 0.45 * side * level, signed=True) for name in ("TranslateX", "TranslateY")),
)
"""The operations of timm's RandAugment that grow with the magnitude (`inc1`)."""

AUTO = """
Posterize .4 8, Rotate .6 9; Solarize .6 5, AutoContrast .6; Equalize .8, Equalize .6; Posterize .6 7, Posterize .6 6;
Equalize .4, Solarize .2 4; Equalize .4, Rotate .8 8; Solarize .6 3, Equalize .6; Posterize .8 5, Equalize 1;
Rotate .2 3, Solarize .6 8; Equalize .6, Posterize .4 6; Rotate .8 8, Color .4 0; Rotate .4 9, Equalize .6;
Equalize 0, Equalize .8; Invert .6, Equalize 1; Color .6 4, Contrast 1 8; Rotate .8 8, Color 1 2;
Color .8 8, Solarize .8 7; Sharpness .4 7, Invert .6; ShearX .6 5, Equalize 1; Color .4 0, Equalize .6;
Equalize .4, Solarize .2 4; Solarize .6 5, AutoContrast .6; Invert .6, Equalize 1; Color .6 4, Contrast 1 8;
Equalize .8, Equalize .6
"""
"""The policy of AutoAugment for ImageNet (Cubuk et al., CVPR 2019): for each operation its probability and level."""


def _auto() -> tuple[Stage, ...]:
    space = {operation.name: operation for operation in (*RAND, Operation("Invert"))}

    def operation(text: str) -> Operation:
        name, probability, *level = text.split()
        return _fixed(space[name], float(probability), int(level[0]) / 9 if level else 0.0)

    return (one_of([[operation(text) for text in texts.split(",")] for texts in AUTO.split(";")]),)


def _rand(magnitude: float, operations: float) -> tuple[Stage, ...]:
    level = magnitude / (BINS - 1)
    return (one_of([[_fixed(operation, 1.0, level)] for operation in RAND]),) * int(operations)


def _augmix() -> tuple[Stage, ...]:
    def level(first: Floats, second: Floats) -> Floats:
        return np.floor(first * AUGMIX_SEVERITY) / (AUGMIX_LEVELS - 1)

    return (up_to(AUGMIX_DEPTH, one_of([[operation] for operation in AUGMIX], level)),)


BLUR = [Operation(name, lambda level, side: 0.1 + 1.9 * level) for name in ("BlurX", "BlurY")]
"""A Gaussian blur with a standard deviation of 0.1 to 2 pixels, as in SimCLR and DeiT III."""


def _three() -> tuple[Stage, ...]:
    """Return the ThreeAugment of DeiT III (Touvron et al., ECCV 2022), without its colour jitter."""
    solarize = _fixed(SOLARIZE, 1.0, 127 / 255)
    return (one_of([[Operation("Grey")], [solarize], BLUR], continuous),)


def _jitter(strength: float, hue: float = 0.0) -> tuple[Stage, ...]:
    """Return torchvision's ColorJitter, with this strength of brightness, contrast and saturation."""

    def factor(level: Floats, side: int) -> Floats:
        return -min(1, strength) * (1 - level) + strength * level

    operations = [Operation(name, factor) for name in ("Brightness", "Contrast", "Color")]
    hues = [Operation("Hue", lambda level, side: hue * (2 * level - 1))] if hue else []
    return (in_random_order([*operations, *hues]),)


def _shift(pixels: float) -> tuple[Stage, ...]:
    """Return shifts by up to this number of whole pixels in both directions, with equal probability for each.

    That is torchvision's RandomCrop with padding, of images that have the size of the crop.
    """

    def shift(level: Floats, side: int) -> Floats:
        return np.floor(level * (2 * pixels + 1)) - pixels

    return tuple(one_of([[Operation(name, shift)]], continuous) for name in ("TranslateX", "TranslateY"))


def _timm(text: str) -> Policy | None:
    """Return the policy of timm's `rand_augment_transform` by its own name; None for another name."""
    pattern = r"rand-m(?P<m>\d+)(-n(?P<n>\d))?(-p(?P<p>[\d.]+))?(-mstd(?P<std>[\d.]+))?-inc1"
    if (match := re.fullmatch(pattern, text)) is None:
        return None
    magnitude, deviation = float(match["m"]), float(match["std"] or 0)

    def level(first: Floats, second: Floats) -> Floats:
        normal: Floats = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)  # Box and Muller, 1958
        return ((magnitude + deviation * normal) / 10).clip(0, 1)

    stage = one_of([[operation] for operation in TIMM], level, float(match["p"] or 0.5))
    return Policy((stage,) * int(match["n"] or 2), fills_with_mean=True)


@dataclass(frozen=True)
class Preset:
    """A policy by name: `make` of as many numbers as there are bounds (low, high), of which the last are optional."""

    make: Callable[..., tuple[Stage, ...]]
    usage: str
    bounds: tuple[tuple[float, float], ...] = ()
    whole: bool = False
    optional: int = 0


PRESETS = {
    "trivial": Preset(lambda: (one_of([[operation] for operation in WIDE]),), "trivial"),
    "rand": Preset(_rand, "rand:MAGNITUDE,OPERATIONS such as rand:9,2", ((0, BINS - 1), (1, 8)), whole=True),
    "auto": Preset(_auto, "auto"),
    "three": Preset(_three, "three"),
    "augmix": Preset(_augmix, "augmix"),
    "jitter": Preset(_jitter, "jitter:STRENGTH or jitter:STRENGTH,HUE", ((0, 10), (0, 0.5)), optional=1),
    "grey": Preset(lambda p: (one_of([[Operation("Grey")]], continuous, p),), "grey:PROBABILITY", ((0, 1),)),
    "blur": Preset(lambda p: (one_of([BLUR], continuous, p),), "blur:PROBABILITY", ((0, 1),)),
    "shift": Preset(_shift, "shift:PIXELS", ((0, 1024),), whole=True),
}
EXAMPLES = "trivial, rand:9,2, auto, three, augmix, jitter:0.4, grey:0.2, blur:0.5, shift:4, rand-m7-mstd0.5-inc1"


@cache
def parse(text: str) -> Policy:
    """Return the policy of `--augment`: none, one of PRESETS or timm's own name, or several joined by `+`.

    Raises:
        UsageError: an unknown name, or numbers that it does not take.
    """
    if text == "none":
        return Policy()
    policies = [_part(part.strip()) for part in text.split("+")]
    if len(policies) > 1 and any(policy.chains > 1 for policy in policies):
        raise UsageError(
            f"--augment {text}: augmix mixes whole chains, and cannot be joined with others: give it alone"
        )
    return Policy(
        sum((policy.stages for policy in policies), ()),
        policies[0].chains,
        any(policy.fills_with_mean for policy in policies),
    )


def _part(text: str) -> Policy:
    if text.startswith("rand-"):
        if (policy := _timm(text)) is None:
            raise UsageError(f"--augment {text} is not timm's rand-mM[-nN][-pP][-mstdS]-inc1: try rand-m7-mstd0.5-inc1")
        return policy
    name, _, arguments = text.partition(":")
    if (preset := PRESETS.get(name)) is None:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        raise UsageError(f"--augment {text} is unknown: try {near[0] if near else EXAMPLES}")
    try:
        numbers = [float(number) for number in arguments.split(",")] if arguments else []
    except ValueError:
        numbers = [float("nan")]
    least, most = len(preset.bounds) - preset.optional, len(preset.bounds)
    fit = all(low <= number <= high for number, (low, high) in zip(numbers, preset.bounds, strict=False))
    if not (least <= len(numbers) <= most and fit and not (preset.whole and any(number % 1 for number in numbers))):
        bounds = " and ".join(f"{low:g} to {high:g}" for low, high in preset.bounds)
        limit = f" with {bounds}" if bounds else ""
        raise UsageError(f"--augment {text} is not {preset.usage}{limit}")
    return Policy(preset.make(*numbers), AUGMIX_CHAINS if name == "augmix" else 1)
