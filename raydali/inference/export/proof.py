"""Proves that an exported file answers as the trained model does.

prove        on the same 8-bit pixels
agreement    as `raydali evaluate`, whose pixels come from the run's own loader, such as DALI

Two programs never add floats in the same order, so the logits differ by rounding. Where the two best logits of an image
are closer than that, the answers may differ: such images are counted as close.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raydali.data.decode.pillow import decoded
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.source import Source
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import CommandError
from raydali.inference import workers
from raydali.inference.engine import Inference, joined
from raydali.inference.export.exported_model import ImageNetwork
from raydali.inference.export.formats import Images, Outputs
from raydali.inference.task_results.classification import THRESHOLD
from raydali.options.placement import PlacementOptions

SHARE_OF_RANGE = 0.01
"""The largest difference of logits that is taken for rounding, as a share of the range of all logits."""
ROUNDING = 1e-5
"""The largest difference of logits that is taken for rounding, even if all logits are equal."""
LEAST = 0.995
"""The share of the answers of `evaluate` that must be the same; one answer may always differ."""
_BATCH, _BATCH_PIXELS = 8, 2**22
"""Images of one size that are compared at once, and their pixels."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Counts how the answers of a file compare with the trained model's, see `Answer`. A label is an answer of its own.

    Attributes:
        images: number of images compared.
        batch_sizes: numbers of images that were computed at once, in order.
        same, close, different: number of answers that are the same; that differ by rounding; and of the others.
        largest_difference: of each output.
        limit: the largest difference of logits, levels or values that is taken for rounding.
        holds: whether all answers are the same but for rounding.
        answers: the trained classifier's, by id: a class, or (C,) whether the image has each label.
    """

    images: int
    batch_sizes: list[int]
    same: int
    close: int
    different: int
    largest_difference: dict[str, float]
    limit: float
    holds: bool
    answers: Mapping[int, NDArray[Any]]

    @property
    def figures(self) -> dict[str, Any]:
        """The figures for JSON."""
        return {name: value for name, value in vars(self).items() if name not in ("holds", "answers")}


def prove(
    network: ImageNetwork, file: Callable[[Images], Outputs], images: Iterable[tuple[int, Images]]
) -> Proof | None:
    """Compare the outputs of a network and of its file; return None if there are no images.

    Args:
        network: on the CPU.
        file: see `Format.opened`.
        images: id and pixels (3, H, W) of each; not all of them in memory.
    """
    classifies, restores = network.answer in ("class", "labels"), network.answer == "image"
    decisive = ("logits",) if classifies else network.outputs
    largest = dict.fromkeys(network.outputs, 0.0)
    low, high = dict.fromkeys(network.outputs, np.inf), dict.fromkeys(network.outputs, -np.inf)
    batch_sizes, of_images, margins = set[int](), list[float](), list[float]()
    by_id, same = dict[int, NDArray[Any]](), 0
    for ids, batch in _batches(images):
        variants = [] if of_images else [*_variants(batch[:1])][: 2 if network.answer == "values" else None]
        for some in [*variants, batch]:
            ours, theirs = _outputs(network, some), _outputs_of_file(network, file, some)
            differences = {name: np.abs(ours[name] - theirs[name]).reshape(len(some), -1).max(1) for name in ours}
            for name, difference in differences.items():
                largest[name] = float(np.maximum(largest[name], difference.max()))  # NaN if one is NaN
                low[name], high[name] = min(low[name], ours[name].min()), max(high[name], ours[name].max())
            batch_sizes.add(len(some))
        of_images += np.max([differences[name] for name in decisive], 0).tolist()
        if classifies:
            answers, others = (_answers(network, outputs["logits"]) for outputs in (ours, theirs))
            by_id.update(zip(ids, answers, strict=True))
            margins += _margins(network, ours["logits"])[answers != others].tolist()
            same += int((answers == others).sum())
    if not of_images:
        return None
    most = float(np.max([largest[name] for name in decisive]))
    widest = max(float(high[name] - low[name]) for name in decisive)
    limit = 1.0 if restores else SHARE_OF_RANGE * max(widest, 0) + ROUNDING
    if classifies:
        different = sum(not margin < most for margin in margins)
        close = len(margins) - different
    else:  # restored images may differ by one level of 255
        same = sum(difference <= (0 if restores else limit) for difference in of_images)
        different = sum(not difference <= limit for difference in of_images)
        close = len(of_images) - same - different
    return Proof(
        images=len(of_images),
        batch_sizes=sorted(batch_sizes),
        same=same,
        close=close,
        different=different,
        largest_difference=largest,
        limit=limit,
        holds=different == 0 and most <= limit,  # which NaN is not
        answers=by_id,
    )


def _answers(network: ImageNetwork, logits: NDArray[Any]) -> NDArray[Any]:
    """Return the classes (n,), or (n, C) whether an image has each label."""
    answers: NDArray[Any] = logits > 0 if network.answer == "labels" else logits.argmax(1)
    return answers


def _margins(network: ImageNetwork, logits: NDArray[Any]) -> NDArray[Any]:
    """Return by how much each answer is better than the next one."""
    best = np.sort(logits, 1)[:, -2:]
    margins: NDArray[Any] = np.abs(logits) if network.answer == "labels" else best[:, -1] - best[:, 0]
    return margins


def _outputs(network: ImageNetwork, images: Images) -> dict[str, NDArray[Any]]:
    with torch.inference_mode():
        outputs = network(torch.from_numpy(np.ascontiguousarray(images)))
    return _named(network, [output.numpy() for output in outputs])


def _outputs_of_file(
    network: ImageNetwork, file: Callable[[Images], Outputs], images: Images
) -> dict[str, NDArray[Any]]:
    try:
        return _named(network, file(np.ascontiguousarray(images)))
    except Exception as error:  # of many kinds
        shape = "x".join(map(str, images.shape))
        raise CommandError(
            f"the exported model does not take images of {shape} ({str(error)[:40]}): change its code, or try "
            "the other --to"
        ) from error


def _named(network: ImageNetwork, outputs: Iterable[NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return outputs by name; levels of 8 bits are signed, so that they have differences."""
    signed = (output.astype(np.int16) if output.dtype == np.uint8 else output for output in outputs)
    return dict(zip(network.outputs, signed, strict=True))


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
    for (height, width), group in groupby(images, lambda pair: pair[1].shape[1:]):
        most = max(1, min(_BATCH, _BATCH_PIXELS // (height * width)))
        for _, some in groupby(enumerate(group), lambda numbered: numbered[0] // most):  # noqa: B023 (used at once)
            ids, pixels = zip(*(pair for _, pair in some), strict=True)
            yield list(ids), np.stack(pixels)


def images_for(
    network: ImageNetwork, source: Source, pipeline: Pipeline[Any], broken: dict[int, str]
) -> Iterator[tuple[int, Images]]:
    """Decode the images of a source by Pillow, as users of a file do.

    Args:
        network: what takes the images: whole ones, or what the pipeline makes.
        source: the samples; of pairs the inputs are taken.
        pipeline: of validation samples.
        broken: gets the reasons why others cannot be read.

    Yields:
        Id and pixels (3, H, W) uint8, RGB, upright.
    """
    files: Any = source.inputs if isinstance(source, ImagePairs) else source
    for id in range(len(source)):
        try:
            if network.answer == "values":
                pixels = pipeline.sample(source, id, 0)[0].numpy()
            else:
                pixels = np.asarray(decoded(files.read(id))).transpose(2, 0, 1)
        except Exception as error:  # of files, of decoders
            broken[id] = str(error)
            continue
        yield id, np.ascontiguousarray(pixels)


def agreement(inference: Inference, options: PlacementOptions, proof: Proof, *, several: bool) -> dict[str, int] | None:
    """Evaluate the same images as `raydali evaluate --precision fp32` does.

    Args:
        inference: the trained classifier with the images, in 32-bit floats.
        options: where it runs.
        proof: has the answers of the exported model.
        several: whether an image may have several labels.

    Returns:
        The number of "answers" on images that both could read, and how many are the "same"; None if there are none.

    Raises:
        UsageError, CommandError, DataError, StorageAway: see `workers.results`.
    """
    arrays = joined(workers.results(inference, inference.parts, options)).arrays
    evaluated = arrays["probabilities"] > THRESHOLD if several else arrays["best"][:, 0]
    proved = proof.answers
    pairs = [(proved[id], answer) for id, answer in zip(arrays["ids"].tolist(), evaluated, strict=True) if id in proved]
    same = np.array([mine == answer for mine, answer in pairs])
    return {"same": int(same.sum()), "answers": same.size} if same.size else None


def suffices(agreed: Mapping[str, int]) -> bool:
    """Return whether so many answers are the same that only rounding of pixels can be the cause."""
    return agreed["answers"] - agreed["same"] <= max(1, (1 - LEAST) * agreed["answers"])
