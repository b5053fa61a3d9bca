"""Model FLOPs utilisation (MFU): the operations that the model needs, as a share of what the devices can do.

The operations of a sample are the matrix products, convolutions and attention in its forward and backward pass, as
torch counts them: a multiplication and an addition are two. What is computed for other reasons does not count.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from raydali.host.hardware import has_bf16

COUNTED_IMAGES = 2
"""Number of images that the operations are counted with: BatchNorm needs more than one."""
PEAK_TFLOPS = {
    "B200": (2250, 1125),
    "GH200": (989, 494),
    "H200 NVL": (835, 417),
    "H200": (989, 494),
    "H100 NVL": (835, 417),
    "H100 PCIe": (756, 378),
    "H100 80GB HBM3": (989, 494),
    "A100": (312, 156),
    "L40S": (362, 183),
    "L4": (121, 60),
    "A40": (149, 74),
    "A30": (165, 82),
    "V100": (125, 15),
    "T4": (65, 8),
}
"""Dense TFLOP/s in 16 bits and in fp32, by words of the device's name, from the data sheets of NVIDIA. For fp32 it
is the rate in TF32, in which torch computes convolutions, where the GPU has it."""

_log = logging.getLogger(__name__)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of a GPU, operations a second in this dtype; None for a CPU, and if it is not known."""
    if device.type != "cuda" or dtype == torch.float64 or (dtype == torch.bfloat16 and not has_bf16(device)):
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype)


def peak_of(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak of a GPU of this name; None if it is not known, or a part of a GPU (MIG)."""
    matching = (peaks for words, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{words}\b", name) and "MIG" not in name)
    half, single = next(matching, (None, None))
    tflops = single if dtype == torch.float32 else half
    return None if tflops is None else tflops * 1e12


def flops_per_image(
    loss: Callable[..., torch.Tensor],
    parameters: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor],
    *,
    sharded: bool = False,
) -> float | None:
    """Count the operations of a forward and backward pass, by computing it for a few images.

    No gradient is kept. Buffers such as BatchNorm's statistics change as in a step.

    Args:
        loss: computes the mean loss of a micro-batch, neither compiled nor captured.
        parameters: the parameters that are trained.
        inputs: the tensors of a micro-batch, samples first.
        sharded: whether the parameters are sharded: all ranks must call it then.

    Returns:
        The operations for each sample; None if the loss cannot be computed for a few of them, which is logged.
    """
    tunes = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False  # it would tune convolutions for this number of images, for seconds
    try:
        few = [tensor[:COUNTED_IMAGES] for tensor in inputs]
        formulas = {torch.ops.aten.convolution_backward: _of_convolution_backward}
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            if sharded:
                loss(*few).backward()
            else:
                torch.autograd.grad(loss(*few), list(parameters), allow_unused=True)
    except Exception as error:  # a figure must not end the run
        _log.warning("the model's FLOPs cannot be counted: %s: %s", type(error).__name__, error)
        return None
    finally:
        torch.backends.cudnn.benchmark = tunes
        for parameter in parameters if sharded else ():
            parameter.grad = None
    return float(counter.get_total_flops() / len(few[0]))


def _of_convolution_backward(
    grad: list[int], images: list[int], weight: list[int], *settings: Sequence[bool], **_: object
) -> int:
    """Count as many for each gradient as for the convolution; torch counts the weight's gradient once for each group.

    Args:
        grad: shape of the output's gradient.
        images: shape of the input.
        weight: shape of the weight.
        settings: the other arguments of aten.convolution_backward.
    """
    transposed, mask = bool(settings[-4]), settings[-1]
    return int(conv_flop_count(images, weight, grad, transposed=transposed) * sum(mask[:2]))
