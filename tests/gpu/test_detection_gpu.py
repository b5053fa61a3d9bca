"""A detector on a GPU: the parts that are CUDA graphs train as launched ones, and a run with them learns the shapes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.detection import SHAPES, network, open_data, train
from raydali.host.hardware import PrecisionName
from raydali.training.cuda_graphs import WARM_UP_STEPS, _GraphedPart
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.models.detection import build_detector, constant_parts, detection_loss
from raydali.training.worker import Worker
from tests.support.ranks import LocalSession, folder_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
GPU = torch.device("cuda", 0)
STEPS, MICRO_BATCHES = WARM_UP_STEPS + 3, 2


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do the same as in test_forward_backward_gpu.py."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def replayed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the parts that were replayed, in order."""
    names: list[str] = []
    replay = _GraphedPart.replay

    def counted(self: _GraphedPart, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        names.append(self._name)
        return replay(self, given)

    monkeypatch.setattr(_GraphedPart, "replay", counted)
    return names


def gradients(name: str, precision_name: PrecisionName, *, graph: bool) -> list[torch.Tensor]:
    """The gradients of each step, of two micro-batches with other images and numbers of boxes, in one tensor."""
    torch.manual_seed(0)
    worker = Worker.join(GPU, cpus=1, node="")
    model = build_detector(name, 5).to(GPU).to(memory_format=torch.channels_last)
    precision = Precision(precision_name, GPU)
    loss = detection_loss(network(model, SHAPES))
    options: dict[str, Any] = {"parts": constant_parts(model), "graph": graph, "micro_batches": MICRO_BATCHES}
    differentiated = ForwardBackward(model, loss, worker, precision, **options)
    result = []
    for step in range(STEPS):
        for index in range(MICRO_BATCHES):
            torch.manual_seed(MICRO_BATCHES * step + index)
            images = torch.randint(256, (2, 3, 128, 128), dtype=torch.uint8, device=GPU)
            corners = 80 * torch.rand(2, 1 + step, 2, device=GPU)
            boxes = torch.cat([corners, corners + 40], 2)
            labels = torch.randint(1, 6, boxes.shape[:2], device=GPU)
            differentiated(images, boxes, labels, last=index == MICRO_BATCHES - 1)
        result.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad(set_to_none=True)
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fcos_resnet50_fpn", ["BackboneWithFPN", "FCOSHead"]),
        ("retinanet_resnet50_fpn_v2", ["BackboneWithFPN", "RetinaNetHead"]),
        ("ssdlite320_mobilenet_v3_large", ["SSDLiteFeatureExtractorMobileNet", "SSDLiteHead"]),
        ("fasterrcnn_resnet50_fpn", ["BackboneWithFPN", "RPNHead"]),
    ],
)
def test_captured_parts_have_the_gradients_of_launched_ones(
    name: str, parts: list[str], precision: PrecisionName, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = gradients(name, precision, graph=False)
    names = replayed(monkeypatch)
    captured = gradients(name, precision, graph=True)
    assert names == parts * (MICRO_BATCHES * STEPS - WARM_UP_STEPS)
    for mine, other in zip(captured, launched, strict=True):
        difference = (mine - other).norm() / other.norm()
        assert difference < (1e-3 if precision == "fp32" else 0.1), difference


@pytest.mark.parametrize("graph", [False, True])
def test_a_run_learns_the_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, graph: bool) -> None:
    names = replayed(monkeypatch)
    config = replace(SHAPES, cuda_graph=graph, precision=None, global_batch_size=16, clip_grad=1.0)
    session = LocalSession(folder_of(tmp_path), device=GPU)
    train(config, open_data(config), session)
    session.checkpoints.finish()
    assert {*names} == ({"Sequential", "FCOSHead"} if graph else set())
    assert session.folder.rows("epochs.jsonl")[-1]["validation"]["map_50"] > 0.5
