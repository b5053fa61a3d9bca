"""Layers as operators that decompose while a model is traced, when shapes and strides are known.

`raydali::batch_norm` becomes the operators of operators.py, or PyTorch's own functions for what these do not take.
`raydali::stem_convolution` becomes a convolution that suits tensor cores, or stays what it is.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from raydali.training.fused import kernels
from raydali.training.fused.operators import INTERPRETED, normalize, normalize_and_pool, statistics
from raydali.training.fused.pooling_kernels import WINDOWS

Tensor = torch.Tensor

STEM_SETTINGS = (2, 2), (3, 3), (1, 1), 1
"""Stride, padding, dilation and groups of the first convolution of many networks."""


def takes(y: Tensor, residual: Tensor | None, weight: Tensor | None, running_mean: Tensor | None) -> bool:
    """Return whether the kernels can compute this; only devices, types, shapes and strides matter."""
    return (
        (y.device.type == "cuda" or INTERPRETED)
        and y.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and y.dim() == 4
        and y.numel() > y.shape[1]  # PyTorch refuses one value per channel
        and y.is_contiguous(memory_format=torch.channels_last)
        and all(tensor is not None and tensor.dtype == torch.float32 for tensor in (weight, running_mean))
        and (residual is None or _adds(y, residual))
    )


def _adds(y: Tensor, residual: Tensor) -> bool:
    same = y.shape == residual.shape and y.dtype == residual.dtype
    return same and y.shape[1] % kernels.SIGNS == 0 and residual.is_contiguous(memory_format=torch.channels_last)


def batch_norm(
    y: Tensor,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
    pool: bool = False,
    group: str = "",
) -> Tensor:
    """Return BatchNorm of y in training, plus the residual if any, through ReLU and max-pooling if so.

    Args:
        y: images (N, C, H, W).
        residual: images like y.
        running_mean: (C); it is updated.
        running_var: (C); it is updated.
        weight: (C).
        bias: (C).
        momentum: share of this batch in the running statistics.
        eps: is added to the variance.
        relu: whether to apply ReLU, as after every addition.
        pool: whether max-pooling follows; then there is ReLU, and no residual.
        group: name of the process group over whose ranks the statistics are computed; empty for this rank alone.

    Raises:
        ValueError: y has one value per channel, or there is a group, and the kernels cannot compute this.
    """
    if takes(y, residual, weight, running_mean):
        mean, rstd = statistics(y.detach(), running_mean, running_var, momentum, eps, group)
        of_channels = mean, rstd, weight, bias
        outputs: tuple[Tensor, ...]
        outputs = (
            normalize_and_pool(y, *of_channels, group) if pool else normalize(y, residual, *of_channels, relu, group)
        )
        return outputs[0]
    if group:
        raise ValueError(f"the kernels cannot normalise a tensor of {y.dtype} of shape {tuple(y.shape)} over ranks")
    output = functional.batch_norm(y, running_mean, running_var, weight, bias, True, momentum, eps)
    output = output if residual is None else output + residual
    output = functional.relu(output) if relu else output
    return functional.max_pool2d(output, *WINDOWS) if pool else output


class SyncBatchNorm(nn.SyncBatchNorm):
    """PyTorch's layer, which compiled in training becomes `raydali::batch_norm` over the ranks of its group."""

    num_batches_tracked: Tensor
    process_group: dist.ProcessGroup

    def forward(self, y: Tensor) -> Tensor:
        """Return the normalised images."""
        is_ours = torch.compiler.is_compiling() and self.training and self.momentum is not None
        if not is_ours or not takes(y, None, self.weight, self.running_mean):
            return super().forward(y)
        self.num_batches_tracked.add_(1)
        statistics_and_weights = self.running_mean, self.running_var, self.weight, self.bias
        others = self.momentum, self.eps, False, False, self.process_group.group_name
        output: Tensor = torch.ops.raydali.batch_norm(y, None, *statistics_and_weights, *others)
        return output


def stem_convolution(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a convolution with STEM_SETTINGS, in a form for tensor cores if it has 7 x 7 pixels of three channels.

    Tensor cores multiply 8 or 16 channels at a time, so that cuDNN pads the three channels of images with zeros, and
    uses a slow kernel. With squares of 2 x 2 pixels as one pixel of 12 channels (space to depth), a convolution of
    4 x 4 with a stride of 1 gives the same sums in another order. A fourth channel of zeros in each image makes 16
    channels of 12. A gradient of the images is not computed in this form, since it would be slow.

    torch.compile does all in the kernel that normalises the images, and gradients go back to the weight as it is in
    the model and in its checkpoints.

    Args:
        images: (N, C, H, W).
        weight: (K, C, height, width).
        bias: (K).
    """
    is_half = images.dtype.itemsize == 2 or torch.is_autocast_enabled(images.device.type)
    on_tensor_cores = is_half and (images.is_cuda or INTERPRETED)
    if not on_tensor_cores or images.dim() != 4 or weight.shape[1:] != (3, 7, 7) or images.requires_grad:
        return functional.conv2d(images, weight, bias, *STEM_SETTINGS)
    height, width = images.shape[2:]
    # The centre of the window is at 4 of 8; the last window ends 3 or 2 pixels after the last pixel.
    return functional.conv2d(_squares(images, 4, 2 + height % 2, 2 + width % 2), _squares(weight, 1, 0, 0), bias)


def _squares(images: Tensor, before: int, below: int, right: int) -> Tensor:
    """Return squares of 2 x 2 pixels of three channels as pixels of 16 channels, after padding with zeros."""
    padded = functional.pad(images, (before, right, before, below, 0, 1))
    squares: Tensor = padded.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 3, 5, 1, 2, 4).flatten(1, 3)
    return squares.contiguous(memory_format=torch.channels_last)


_LIBRARY = torch.library.Library("raydali", "FRAGMENT")
_LIBRARY.define("batch_norm" + torch.library.infer_schema(batch_norm, mutates_args=("running_mean", "running_var")))
_LIBRARY.impl("batch_norm", batch_norm, "CompositeImplicitAutograd")
_LIBRARY.define("stem_convolution" + torch.library.infer_schema(stem_convolution, mutates_args=()))
_LIBRARY.impl("stem_convolution", stem_convolution, "CompositeImplicitAutograd")
