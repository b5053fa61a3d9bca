"""Makes the step of `raydali bench train` and `strategies`: both passes of micro-batches, and the optimizer."""

from collections.abc import Callable
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from raydali.training.forward_backward import ForwardBackward, Precision
    from raydali.training.worker import Worker

Step = Callable[["torch.Tensor", "torch.Tensor"], None]
"""One optimizer step on images and labels."""


def optimizer_step(
    model: "torch.nn.Module",
    wrapped: "torch.nn.Module",
    worker: "Worker",
    precision: "Precision",
    *,
    overlap: bool | None = None,
    micro_batches: int = 1,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    **options: Any,
) -> tuple[Step, "ForwardBackward"]:
    """Return a function that trains on a micro-batch, and its part without the optimizer.

    The learning rate is 0: the weights do not change.

    Args:
        model: the model whose parameters are optimized.
        wrapped: the model, or a wrapper of it, that is called with images.
        worker: this rank.
        precision: precision of the forward and the backward pass.
        overlap: an option of ForwardBackward.
        micro_batches: number of micro-batches of this rank in a step of the optimizer.
        optimizer: SGD with momentum, or AdamW.
        options: other options of ForwardBackward.
    """
    import torch

    from raydali.training.batchnorm import RunningStatistics
    from raydali.training.forward_backward import ForwardBackward
    from raydali.training.optim import build_optimizer

    updates = build_optimizer(optimizer, model, learning_rate=0.0, weight_decay=5e-5, nesterov=True)
    criterion = torch.nn.CrossEntropyLoss()
    of_all = micro_batches * worker.world_size
    forward_backward = ForwardBackward(
        model,
        lambda images, labels: criterion(wrapped(images), labels),
        worker,
        precision,
        micro_batches=of_all,
        overlap=overlap,
        **options,
    )
    statistics = RunningStatistics(model, micro_batches=micro_batches, all_micro_batches=of_all)
    indices = cycle(range(micro_batches))

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        index = next(indices)
        statistics.begin_micro_batch(index)
        forward_backward(images, labels, last=index == micro_batches - 1)
        statistics.end_micro_batch(index)
        if index < micro_batches - 1:
            return
        precision.scaler.step(updates)
        precision.scaler.update()
        updates.zero_grad(set_to_none=True)

    return step, forward_backward
