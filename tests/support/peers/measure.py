"""The child process of one loader: it converts the images, or it measures.

    python -m tests.support.peers.measure TASK ANSWER

TASK is a `Task` as JSON. ANSWER is the file for the result, or for {"error": the last line of the exception}.
"""

import importlib
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.peers import Batches, Setup, keys, s3, split

WARM_UP = 0.2
"""Length of the warm-up, as a share of the timed segment's."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of a child process.

    Attributes:
        peer: a module of this folder.
        source: a local folder or an `s3://` URI.
        work: an empty local folder.
        target: where to convert to, a local folder; empty: measure.
        seconds: length of a timed segment.
        train: also measure training of ResNet-50.
        compile: compile its step.
    """

    peer: str
    source: str
    work: str
    target: str = ""
    threads: int
    device: str
    batch_size: int
    image_size: int
    seconds: float
    train: bool = False
    compile: bool = False


def main(task: Task) -> dict[str, Any]:
    """Convert or measure.

    Returns:
        {"seconds"} of a conversion; or {"images_per_second", "cpu_seconds_per_1000", "images": delivered in all} and,
        after training, {"training_images_per_second"}.
    """
    peer = importlib.import_module(f"tests.support.peers.{task.peer}")
    start = time.perf_counter()
    if task.target:
        peer.prepare(task.source, task.target, task.threads)
        return {"seconds": time.perf_counter() - start}
    setup = Setup(
        images=task.source,
        cache=task.work,
        threads=task.threads,
        device=task.device,
        batch_size=task.batch_size,
        image_size=task.image_size,
    )
    batches = peer.batches(setup)
    alone = timed(batches, require(setup), task)
    result = {"images_per_second": alone[0], "cpu_seconds_per_1000": 1000 * alone[1]}
    if task.train:
        result["training_images_per_second"] = timed(batches, train_step(task), task)[0]
    return result


def timed(batches: Batches, use: Callable[[Any, Any], None], task: Task) -> tuple[float, float]:
    """Take batches for a warm-up and for a timed segment, in rounds of one batch per thread.

    Batches of worker processes arrive in such bursts.

    Returns:
        Images per second, and CPU seconds per image of this process and its descendants.
    """

    def take(seconds: float) -> int:
        end = time.perf_counter() + seconds
        for rounds in itertools.count(1):
            for images, labels in itertools.islice(batches, task.threads):
                use(images, labels)
            synchronize(task.device)
            if time.perf_counter() >= end:
                return rounds * task.threads * task.batch_size
        raise AssertionError("endless")

    take(WARM_UP * task.seconds)
    cpu, start = cpu_seconds(), time.perf_counter()
    taken = take(task.seconds)
    seconds = time.perf_counter() - start
    return taken / seconds, (cpu_seconds() - cpu) / taken


def require(setup: Setup) -> Callable[[Any, Any], None]:
    """Return a function that checks that a batch is what all loaders shall deliver."""
    import torch

    size, count = setup.image_size, setup.batch_size

    def check(images: Any, labels: Any) -> None:
        if images.dtype != torch.uint8 or tuple(images.shape) not in ((count, size, size, 3), (count, 3, size, size)):
            raise ValueError(
                f"images are {images.dtype} {tuple(images.shape)}, not {count} of 8 bits and {size} x {size}"
            )
        if images.device != torch.device(setup.device) or labels.numel() != count:
            raise ValueError(f"images are on {images.device} with {labels.numel()} labels, not on {setup.device}")

    return check


def train_step(task: Task) -> Callable[[Any, Any], None]:
    """Return a step of ResNet-50 in bf16 and channels last, with SGD; the host is at most two steps ahead."""
    import torch
    import torchvision
    from torch.nn.functional import cross_entropy

    model = torchvision.models.resnet50().to(task.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)
    ahead: deque[Any] = deque()

    def loss_of(images: Any, labels: Any) -> Any:
        if images.shape[-1] == 3:
            images = images.permute(0, 3, 1, 2)
        images = (images.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
        with torch.autocast(torch.device(task.device).type, torch.bfloat16):
            return cross_entropy(model(images), labels)

    forward: Callable[[Any, Any], Any] = torch.compile(loss_of) if task.compile else loss_of

    def step(images: Any, labels: Any) -> None:
        forward(images, labels.flatten().long()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if task.device != "cpu":
            ahead.append(torch.cuda.Event())
            ahead[-1].record()
            if len(ahead) > 2:
                ahead.popleft().synchronize()

    return step


def synchronize(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def cpu_seconds() -> float:
    """Sum the CPU time of this process and all its descendants, those that have ended too."""
    import psutil

    total, this = 0.0, psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def upload(folder: str, uri: str) -> None:
    """Copy a local folder to S3, unless as many objects are there already."""
    import os
    from concurrent.futures import ThreadPoolExecutor

    client, (bucket, prefix) = s3(os.getpid()), split(uri)
    files = [Path(root, name) for root, _, names in os.walk(folder, followlinks=True) for name in names]
    if len(keys(uri)) != len(files):
        with ThreadPoolExecutor(16) as pool:
            names = [f"{prefix}/{path.relative_to(folder)}" for path in files]
            list(pool.map(lambda path, name: client.upload_file(str(path), bucket, name), files, names))


if __name__ == "__main__":
    try:
        answer = main(Task(**json.loads(sys.argv[1])))
    except BaseException as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        # The cause of an error of a worker process is at its end.
        message = message if len(message) <= 300 else f"{type(error).__name__}: ... {message[-280:]}"
        Path(sys.argv[2]).write_text(json.dumps({"error": message}))
        raise
    Path(sys.argv[2]).write_text(json.dumps(answer))
    # The processes of some loaders take long to end, or wait for each other; the parent ends them.
    sys.stdout.flush()
    import os

    os._exit(0)
