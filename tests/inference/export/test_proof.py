"""The proof of an exported file finds what a file may get wrong."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from raydali.errors import CommandError
from raydali.inference.export.exported_model import classifier, restorer
from raydali.inference.export.formats import Images, Outputs
from raydali.inference.export.proof import Proof, prove, suffices

SIZES = [(4, 4)] * 11 + [(5, 3), (4, 4)]


class Means(nn.Module):
    """The logits of an image are the mean of its red, and twice that of its green."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, :2].float().mean((2, 3)) * torch.tensor([1.0, 2.0])


def proof_of(change: Callable[[Outputs], Outputs], *, several: bool = False, tie: bool = False) -> Proof:
    network = classifier(nn.Identity(), Means(), several=several)
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (3, *size), np.uint8) for size in SIZES]
    if tie:
        images[7][:2] = np.array([200, 100])[:, None, None]

    def file(images: Images) -> Outputs:
        return change(tuple(each.numpy() for each in network(torch.from_numpy(images))))

    proof = prove(network, file, enumerate(images))
    assert proof is not None
    return proof


def test_an_equal_file_is_proved_in_batches_of_several_sizes() -> None:
    proof = proof_of(lambda outputs: outputs)
    assert proof.holds and (proof.images, proof.same, proof.close, proof.different) == (13, 13, 0, 0)
    assert proof.batch_sizes == [1, 2, 3, 8] and proof.largest_difference == {"logits": 0, "probabilities": 0}
    assert sorted(proof.answers) == [*range(13)]


def test_an_answer_that_rounding_tips_is_counted_as_close() -> None:
    """Image 7 has two equal logits."""
    proof = proof_of(lambda outputs: (outputs[0], outputs[1] + np.array([0, 1e-3], np.float32)), tie=True)
    assert proof.holds and (proof.same, proof.close, proof.different) == (12, 1, 0)
    assert proof.largest_difference["logits"] == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("several", [False, True])
def test_wrong_logits_are_found(several: bool) -> None:
    swapped = proof_of(lambda outputs: (outputs[0], 200 - outputs[1]), several=several)
    assert not swapped.holds and swapped.close + swapped.different > 0
    shifted = proof_of(lambda outputs: (outputs[0], outputs[1] + 10), several=several)
    assert shifted.different == 0 and not shifted.holds, "answers are the same, but logits are not"


def test_what_is_not_a_number_is_found() -> None:
    assert not proof_of(lambda outputs: (outputs[0], outputs[1] * np.nan)).holds


def test_a_file_that_takes_one_image_alone_is_refused() -> None:
    def alone(outputs: Outputs) -> Outputs:
        if len(outputs[0]) > 1:
            raise RuntimeError("Got: 2 Expected: 1")
        return outputs

    with pytest.raises(CommandError, match="2x3x4x4"):
        proof_of(alone)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_restored_images_may_differ_by_one_level(level: int) -> None:
    network = restorer(nn.Threshold(0, 0.0))  # 1 and more stay
    images = [np.full((3, 4, 6), value, np.uint8) for value in (1, 7, 255)]
    proof = prove(network, lambda images: (np.full(images.shape, 255 - level, np.uint8),), enumerate(images))
    assert proof is not None
    counts = [0, 0, 0]
    counts[level] = 3
    assert [proof.same, proof.close, proof.different] == counts and proof.holds == (level < 2)
    assert proof.largest_difference == {"restored": level}


COUNTS = (9, 10), (8, 11), (995, 1000)


def test_one_answer_in_200_may_differ() -> None:
    enough = {
        answers: suffices({"same": same, "answers": answers}) for same, answers in ((9, 10), (8, 11), (995, 1000))
    }
    assert enough == {10: True, 11: False, 1000: True}
    assert not suffices({"same": 994, "answers": 1000})
