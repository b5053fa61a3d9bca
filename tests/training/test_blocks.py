"""The repeated blocks of networks, and training that computes their activations again."""

import re
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import load
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from raydali import UsageError
from raydali.run.folder import RunFolder
from raydali.training.blocks import kept_activations, recomputed, repeated_blocks
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.models.factories import set_drop_path
from raydali.training.worker import Worker
from tests.support.copied_jobs import changed_copy, opened
from tests.support.digits import residual_digits
from tests.support.quick import first_quick
from tests.support.ranks import LocalSession, folder_of, run_ranks

CPU = torch.device("cpu")


@first_quick(
    ("name", "blocks"),
    [
        ("resnet18", {"BasicBlock": 8}),
        ("vit_b_16", {"EncoderBlock": 12}),
        ("convnext_tiny", {"CNBlock": 18}),
        ("efficientnet_v2_s", {"FusedMBConv": 10, "MBConv": 30}),
        ("mobilenet_v3_small", {"InvertedResidual": 11}),
        ("densenet121", {"_DenseLayer": 58}),
        ("video.r2plus1d_18", {"BasicBlock": 8}),
        ("segmentation.fcn_resnet50", {"Bottleneck": 16}),
        ("vgg11", {}),
        ("timm:convnext_atto", {"ConvNeXtBlock": 12}),
        ("timm:vit_giant_patch14_dinov2", {"Block": 40}),
        ("timm:swin_tiny_patch4_window7_224", {"SwinTransformerBlock": 12}),
    ],
)
def test_blocks_of_networks(name: str, blocks: dict[str, int]) -> None:
    with torch.device("meta"):
        if name.startswith("timm:"):
            model = timm.create_model(name.removeprefix("timm:"))
        else:
            backbone = {"weights_backbone": None} if "fcn" in name else {}
            model = torchvision.models.get_model(name.rpartition(".")[2], **backbone)
    assert Counter(type(block).__name__ for block in repeated_blocks(model)) == blocks


def residual_network(drop_path: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = ResNet(BasicBlock, [2, 1, 1, 1], num_classes=10)
    if drop_path:
        set_drop_path(model, drop_path)
    return model.double()


def transformer(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.VisionTransformer(32, 8, 3, 2, 32, 64, num_classes=10, dropout=dropout)
    return model.double()


def trained(model: nn.Module, loss: Callable[..., torch.Tensor]) -> dict[str, np.ndarray]:
    """Losses, gradients and buffers of two passes."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(4, 3, 32, 32, generator=generator).double(), torch.arange(4)
    torch.manual_seed(1)
    losses = {}
    for number in range(2):
        losses[f"loss {number}"] = value = loss(images, labels)
        value.backward()
    left = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    tensors = {**losses, **left, **dict(model.named_buffers())}
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items() if tensor is not None}


def cross_entropy_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda images, labels: F.cross_entropy(model(images), labels)


NETWORKS = [
    pytest.param(residual_network, id="BatchNorm"),
    pytest.param(partial(residual_network, 0.5), id="stochastic depth"),
    pytest.param(partial(transformer, 0.5), id="dropout"),
]


@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_and_statistics_stay_the_same(network: Callable[[], nn.Module]) -> None:
    model = network()
    changed = deepcopy(model)
    recomputed(changed)
    expected = trained(model, cross_entropy_of(model))
    for name, value in trained(changed, cross_entropy_of(changed)).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert [*changed.state_dict()] == [*model.state_dict()]


@pytest.mark.slow
def test_a_compiled_network_counts_batches_once() -> None:
    torch.manual_seed(0)
    model = residual_digits(10).double()
    changed = deepcopy(model)
    recomputed(changed)
    expected = trained(model, cross_entropy_of(model))
    compiled = torch.compile(cross_entropy_of(changed), backend="aot_eager_decomp_partition", fullgraph=True)
    for name, value in trained(changed, compiled).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-9, err_msg=name)


def saved_bytes(model: nn.Module) -> int:
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(0 if isinstance(tensor, nn.Parameter) else tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(torch.zeros(2, 3, 64, 64))
    assert output.requires_grad is torch.is_grad_enabled()
    return sum(sizes)


def test_less_is_kept_and_nothing_without_training() -> None:
    model = ResNet(Bottleneck, [2, 2, 2, 2], num_classes=10)
    whole = saved_bytes(model)
    recomputed(model)
    assert saved_bytes(model) < 0.3 * whole
    with kept_activations():
        assert saved_bytes(model) == whole
    copied = deepcopy(model)
    assert saved_bytes(copied) == saved_bytes(model)
    model.eval()
    with torch.no_grad():
        assert saved_bytes(model) == 0


def flops(model: nn.Module) -> float | None:
    worker = Worker.join(CPU, cpus=1, node="here")
    run = ForwardBackward(model, cross_entropy_of(model), worker, Precision("fp64", CPU), micro_batches=1)
    return run.flops_per_image(torch.zeros(2, 3, 32, 32).double(), torch.arange(2))


def test_what_is_computed_again_is_no_work_of_the_model() -> None:
    model = residual_network()
    before = flops(model)
    recomputed(model)
    assert before and flops(model) == before


def test_a_network_without_blocks_is_refused() -> None:
    message = "--activation-checkpointing needs a network of repeated blocks, and VGG has none: leave it out"
    with torch.device("meta"), pytest.raises(UsageError, match=re.escape(message)):
        recomputed(torchvision.models.vgg11())


def of_sequences(num_classes: int) -> nn.Sequential:
    """Blocks of one of PyTorch's own classes, which are not found."""
    blocks = [
        nn.Sequential(nn.Conv2d(size, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8))
        for size in (3, 8, 8)
    ]
    return nn.Sequential(nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))


BLOCKS = {"labels=data.train.one_each)": "labels=data.train.one_each, blocks=lambda model: [*model[0]])"}
SHARDED: dict[str, Any] = {"shard": "all", "activation_checkpointing": True}
IN_DOUBLE: dict[str, Any] = {"precision": "fp64", "learning_rate": 0.01, "epochs": 1, "batch_size": 24}


def train_copy(file: Path, folder: RunFolder, **options: Any) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return what a run says of blocks, and its weights."""
    model = f"{__name__}:of_sequences"
    job, config, data = opened(file, model=model, global_batch_size=48, ema_decay=0.9, **IN_DOUBLE, **options)
    session = LocalSession(folder)
    job.train(config, data, session)
    session.checkpoints.finish()
    weights = {name: tensor.numpy() for name, tensor in load(folder.read("best/model.safetensors")).items()}
    return [str(message) for message in session.messages if "blocks" in str(message)], weights


@pytest.mark.slow
def test_a_job_may_name_its_blocks(tmp_path: Path) -> None:
    job, folders = (
        changed_copy("imagenet", BLOCKS, tmp_path),
        [folder_of(tmp_path, name) for name in ("whole", "parts")],
    )
    ((_, whole),) = run_ranks(1, train_copy, job, folders[0])
    (said, parts), _ = run_ranks(2, partial(train_copy, **SHARDED), job, folders[1])
    assert not said, "the blocks are found"
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_blocks_of_another_network_are_refused(tmp_path: Path) -> None:
    job = changed_copy(
        "imagenet",
        {name: text.replace("[*model[0]]", "model[0].named_children()") for name, text in BLOCKS.items()},
        tmp_path,
    )
    with pytest.raises(AssertionError, match=r"UsageError.*`blocks` must return modules"):
        run_ranks(1, partial(train_copy, activation_checkpointing=True), job, folder_of(tmp_path))
