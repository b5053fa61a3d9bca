"""A captured validation against one that is launched kernel by kernel, on one GPU.

pytest -s tests/gpu/test_validation_gpu.py -k "images_a_second or first_batch"     prints times, before and now
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from raydali.data.load.dali_loader import DaliLoader
from raydali.data.load.loader import Batch
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.classification import ValidationImages
from raydali.training.evaluation.classification import evaluate
from raydali.training.evaluation.validation import ValidationForward
from raydali.training.forward_backward import Precision
from raydali.training.models.normalized import Normalized
from raydali.training.models.small_images import digits_network
from raydali.training.optim import MovingAverage
from raydali.training.worker import Worker
from tests.support.pictures import encoded, files, photograph

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def images_of(count: int, side: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(0)
    images = torch.randint(256, (count, 3, side, side), generator=generator, dtype=torch.uint8, device="cuda")
    return images.contiguous(memory_format=torch.channels_last)


def validated(
    model: nn.Module, worker: Worker, images: torch.Tensor, samples: int, batch_size: int
) -> dict[str, float]:
    """Validate on these images, again and again; each rank of the labels has an image."""
    labels = torch.arange(len(images), device="cuda") % 10

    def batches() -> Iterator[Batch]:
        for micro_batch in OrderedPass(samples=samples, batch_size=batch_size).micro_batches(0, 1):
            chosen = images[: len(micro_batch.ids)], labels[: len(micro_batch.ids)]
            yield Batch(dict(zip(("images", "labels"), chosen, strict=True)), micro_batch)

    return evaluate(model, batches(), worker, Precision("bf16", worker.device))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_metrics_are_those_of_a_launched_validation(compiled: bool) -> None:
    """Of the average, after each of several updates, with a smaller last batch."""
    worker, images = Worker.join(torch.device("cuda", 0), cpus=1, node=""), images_of(64, 32)
    torch.manual_seed(0)
    model = digits_network(10).cuda().to(memory_format=torch.channels_last)
    average = MovingAverage(model, 0.5)
    network = Normalized(average.module).cuda()
    inference = ValidationForward(network, Precision("bf16", worker.device))
    inference.warm_up(images, compiled=compiled, graph=True)
    assert inference._graph is not None
    losses = []
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        average.update_parameters(model)
        fast, slow = (validated(each, worker, images, 150, 64) for each in (inference, network))
        assert fast["images"] == 150
        assert fast["loss"] == pytest.approx(slow["loss"], rel=0.02)
        assert fast["top1"] == pytest.approx(slow["top1"], abs=0.03)
        losses.append(slow["loss"])
    assert max(abs(np.diff(losses)) / losses[0]) > 0.1  # the updates matter


def images_a_second(model: nn.Module, worker: Worker, images: torch.Tensor, samples: Sequence[int]) -> list[float]:
    """Of validations of so many samples each."""
    rates = []
    for count in samples:
        began = time.perf_counter()
        assert validated(model, worker, images, count, len(images))["images"] == count
        rates.append(count / (time.perf_counter() - began))
    return rates


def test_images_a_second() -> None:
    worker, images = Worker.join(torch.device("cuda", 0), cpus=1, node=""), images_of(256, 224)
    torch.backends.cudnn.benchmark = True
    network = Normalized(torchvision.models.resnet50()).cuda().to(memory_format=torch.channels_last)
    captured, compiled = (ValidationForward(network, Precision("bf16", worker.device)) for _ in range(2))
    captured.warm_up(images, compiled=False, graph=True)
    compiled.warm_up(images, compiled=True, graph=True)
    few, many = 5_000, 25_600
    models = {"launched": network, "captured": captured, "compiled and captured": compiled}
    rates = {name: images_a_second(model, worker, images, (few, many, many)) for name, model in models.items()}
    for name, (first, *others) in rates.items():
        print(f"\n{name}: {max(others):.0f} images/s; the first {few} in {few / first:.2f} s")
    before, _, now = rates.values()
    assert max(now[1:]) > 1.2 * max(before[1:]) and few / now[0] < 1


def test_the_first_batch_of_a_loader_that_began_ahead(tmp_path: Path) -> None:
    """The loader of the training has begun before, as in a run; so what a process allocates once is allocated."""
    photographs = {str(i): encoded(photograph(("china", "flower")[i % 2], (500, 400 + i))) for i in range(64)}
    source, seconds = files(tmp_path, **photographs), list[float]()
    order, pipeline = OrderedPass(samples=64, batch_size=64), ValidationImages(image_size=224, resize_size=256)

    def loader() -> DaliLoader:
        return DaliLoader(source, pipeline, order, device="cuda", threads=8)

    def first(of: DaliLoader) -> Batch:
        began = time.perf_counter()
        batch = next(iter(of))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        return batch

    with loader() as training, loader() as usual, loader() as ahead:
        next(iter(training))
        for _ in range(3):
            ahead.begin_ahead()
            ahead.wait_until_begun()
            expected, batch = first(usual), first(ahead)
            assert torch.equal(expected["images"], batch["images"]) and batch.ids.tolist() == [*range(64)]
    print("\nseconds to the first batch:", *(f"{each:.3f}" for each in seconds[::2]), "begun ahead:", end=" ")
    print(*(f"{each:.3f}" for each in seconds[1::2]))
    assert sum(seconds[1::2]) < sum(seconds[::2]) / 2
