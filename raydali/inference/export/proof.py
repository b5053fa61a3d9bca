"""Proof that an exported file answers as the trained model does, on the same 8-bit pixels.

Two programs never add floats in the same order, so the logits differ by rounding. Where the two best logits of an image
are closer than that, the answers may differ: such images are counted as close.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raydali.data.sources.image_pairs import ImagePairs
from raydali.data.sources.source import Source
from raydali.data.tasks.pillow import decoded
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import CommandError
from raydali.inference.export.exported_model import ImageClassifier, ImageNetwork, ImageRestorer
from raydali.inference.export.formats import Images, Outputs

SHARE_OF_RANGE = 0.01
"""The largest difference of logits that is taken for rounding, as a share of the range of all logits."""
ROUNDING = 1e-5
"""The largest difference of logits that is taken for rounding, even if all logits are equal."""
_BATCH, _BATCH_PIXELS = 8, 2**22
"""Images of one size that are compared at once, and their pixels."""


@dataclass
class Proof:
    """How the answers of a file compare with those of the trained model.

    An answer is the most probable class of an image; or for each label whether it is more likely than not; or a
    restored image; or all outputs for an image.

    Attributes:
        several: whether an image may have several labels.
        images: number of images compared.
        batch_sizes: numbers of images that were computed at once.
        same, close, different: number of answers that are the same; that differ by rounding; and of the others.
        largest: the largest differences, of "logits" and "probabilities"; or of "levels", of 255; or of "outputs".
        limit: the largest difference of logits or levels that is taken for rounding.
        answers: those of the trained model, by id.
    """

    several: bool = False
    images: int = 0
    batch_sizes: set[int] = field(default_factory=set)
    same: int = 0
    close: int = 0
    different: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    limit: float = 0.0
    answers: dict[int, NDArray[Any]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """True if all answers are the same but for rounding."""
        first = next(iter(self.largest.values()), np.nan)
        return self.different == 0 and first <= self.limit  # which NaN is not

    @property
    def figures(self) -> dict[str, Any]:
        """The figures for JSON."""
        answers = {"same": self.same, "close": self.close, "different": self.different}
        batches = {"images": self.images, "batch_sizes": sorted(self.batch_sizes)}
        return batches | answers | {"largest_difference": self.largest, "limit": self.limit}


def prove(
    network: ImageClassifier | ImageRestorer | ImageNetwork,
    file: Callable[[Images], Outputs],
    images: Iterable[tuple[int, Images]],
) -> Proof:
    """Compare the outputs of a network and of its file.

    Args:
        network: on the CPU.
        file: see `Format.opened`.
        images: id and pixels (3, H, W) of each; not all of them in memory.
    """
    proof = Proof(several=getattr(network, "several", False))
    compared: _Logits | _Levels | _Values = _Levels(proof)
    if not isinstance(network, ImageRestorer):
        compared = _Logits(proof) if isinstance(network, ImageClassifier) else _Values(proof)
    for ids, batch in _batches(images):
        variants = [*_variants(batch[:1])][: 2 if isinstance(network, ImageNetwork) else None]
        for some in () if proof.images else variants:
            compared.differences(_outputs(network, some), _outputs_of_file(file, some))
            proof.batch_sizes.add(len(some))
        ours, theirs = _outputs(network, batch), _outputs_of_file(file, batch)
        compared.differences(ours, theirs)
        proof.answers.update(zip(ids, compared.answers(ours, theirs), strict=True))
        proof.images += len(ids)
        proof.batch_sizes.add(len(ids))
    compared.finish()
    return proof


class _Logits:
    """Compares probabilities and logits."""

    def __init__(self, proof: Proof) -> None:
        self.proof = proof
        proof.largest = {"logits": 0.0, "probabilities": 0.0}
        self.low, self.high = np.inf, -np.inf
        self.margins: list[float] = []

    def differences(self, ours: Outputs, theirs: Outputs) -> None:
        for name, one, other in zip(("probabilities", "logits"), ours, theirs, strict=True):
            self.proof.largest[name] = float(np.maximum(self.proof.largest[name], np.abs(one - other).max()))
        self.low, self.high = min(self.low, ours[1].min()), max(self.high, ours[1].max())

    def answers(self, ours: Outputs, theirs: Outputs) -> NDArray[Any]:
        (_, logits), (_, others) = ours, theirs
        if self.proof.several:
            answers, margins, differ = logits > 0, np.abs(logits), (logits > 0) != (others > 0)
        else:
            answers, differ = logits.argmax(1), logits.argmax(1) != others.argmax(1)
            best = np.sort(logits, 1)[:, -2:]
            margins = best[:, -1] - best[:, 0]
        self.proof.same += int((~differ).sum())
        self.margins += margins[differ].tolist()
        return np.asarray(answers)

    def finish(self) -> None:
        largest = self.proof.largest["logits"]
        self.proof.close = sum(margin < largest for margin in self.margins)
        self.proof.different = len(self.margins) - self.proof.close
        self.proof.limit = float(SHARE_OF_RANGE * max(self.high - self.low, 0) + ROUNDING)


class _Levels:
    """Compares restored images, which may differ by one level of 255."""

    def __init__(self, proof: Proof) -> None:
        self.proof = proof
        proof.largest, proof.limit = {"levels": 0.0}, 1.0

    def differences(self, ours: Outputs, theirs: Outputs) -> None:
        self.proof.largest["levels"] = max(self.proof.largest["levels"], float(_levels(ours, theirs).max()))

    def answers(self, ours: Outputs, theirs: Outputs) -> NDArray[Any]:
        of_images = _levels(ours, theirs).max((1, 2, 3))
        self.proof.same += int((of_images == 0).sum())
        self.proof.close += int((of_images == 1).sum())
        self.proof.different += int((of_images > 1).sum())
        return np.asarray(of_images)

    def finish(self) -> None:
        pass


class _Values:
    """Compares outputs of any kind, image by image."""

    def __init__(self, proof: Proof) -> None:
        self.proof, self.scale, self.of_images = proof, 0.0, list[float]()
        proof.largest = {"outputs": 0.0}

    def differences(self, ours: Outputs, theirs: Outputs) -> None:
        for one, other in zip(ours, theirs, strict=True):
            self.scale = max(self.scale, float(np.ptp(one)))
            self.proof.largest["outputs"] = float(np.maximum(self.proof.largest["outputs"], np.abs(one - other).max()))

    def answers(self, ours: Outputs, theirs: Outputs) -> NDArray[Any]:
        each = [np.abs(one - other).reshape(len(one), -1).max(1) for one, other in zip(ours, theirs, strict=True)]
        self.of_images += (found := np.max(each, 0)).tolist()
        return np.asarray(found)

    def finish(self) -> None:
        self.proof.limit = SHARE_OF_RANGE * self.scale + ROUNDING
        self.proof.different = sum(not difference <= self.proof.limit for difference in self.of_images)
        self.proof.same = len(self.of_images) - self.proof.different


def _levels(ours: Outputs, theirs: Outputs) -> NDArray[np.int16]:
    levels: NDArray[np.int16] = np.abs(ours[0].astype(np.int16) - theirs[0].astype(np.int16))
    return levels


def _outputs(network: nn.Module, images: Images) -> Outputs:
    with torch.inference_mode():
        return tuple(output.numpy() for output in network(torch.from_numpy(np.ascontiguousarray(images))))


def _outputs_of_file(file: Callable[[Images], Outputs], images: Images) -> Outputs:
    try:
        return file(np.ascontiguousarray(images))
    except Exception as error:  # of many kinds
        shape = "x".join(map(str, images.shape))
        raise CommandError(
            f"the exported model does not take images of {shape} ({str(error)[:40]}): change its code, or try "
            "the other --to"
        ) from error


def _variants(image: Images) -> Iterator[Images]:
    """Yield an image (1, 3, H, W) alone, with its mirror image, and less a row or a column.

    They show that any number of images and even and odd sizes are taken, also if all samples have one size.
    """
    yield image
    yield np.concatenate([image, image[..., ::-1]])
    for less in (image[..., :-1, :], image[..., :-1]):
        if less.size:
            yield less


def _batches(images: Iterable[tuple[int, Images]]) -> Iterator[tuple[list[int], Images]]:
    """Yield ids and pixels (N, 3, H, W) of consecutive images of one size."""
    for (height, width), group in groupby(images, lambda each: each[1].shape[1:]):
        most = max(1, min(_BATCH, _BATCH_PIXELS // (height * width)))
        for _, some in groupby(enumerate(group), lambda each: each[0] // most):  # noqa: B023 (used at once)
            ids, pixels = zip(*(each for _, each in some), strict=True)
            yield list(ids), np.stack(pixels)


def images_for(
    network: ImageClassifier | ImageRestorer | ImageNetwork,
    source: Source,
    pipeline: Pipeline[Any],
    broken: dict[int, str],
) -> Iterator[tuple[int, Images]]:
    """Decode the images of a source by Pillow, as users of a file do.

    Args:
        network: what takes the images: whole ones, or those of the pipeline.
        source: the samples; of pairs the inputs are taken.
        pipeline: of validation samples.
        broken: gets the reasons why others cannot be read.

    Yields:
        Id and pixels (3, H, W) uint8, RGB, upright.
    """
    files: Any = source.inputs if isinstance(source, ImagePairs) else source
    for id in range(len(source)):
        try:
            if isinstance(network, ImageNetwork):
                pixels = pipeline.sample(source, id, 0)[0].numpy()
            else:
                pixels = np.asarray(decoded(files.read(id))).transpose(2, 0, 1)
        except Exception as error:  # of files, of decoders
            broken[id] = str(error)
            continue
        yield id, np.ascontiguousarray(pixels)
