"""SPDL: threads that decode with FFmpeg, and a batch that is made of decoded frames at once."""

# https://facebookresearch.github.io/spdl/latest/best_practice.html, "Avoid creating intermediate tensors"
import importlib.util
import math
import random
from pathlib import Path
from typing import Any

from tests.support.peers import Batches, Setup, images_of, read, shuffled

NAME = "SPDL"
PACKAGE = DISTRIBUTION = "spdl"
READERS = 4
"""Threads that read, per thread that decodes, if objects come from S3."""


def environment(workdir: str) -> dict[str, str]:
    """Name a folder with FFmpeg's libraries as SPDL looks for them, which are PyAV's under other names."""
    av = importlib.util.find_spec("av")
    if av is None or av.origin is None:
        return {}
    folder = Path(workdir, "ffmpeg")
    folder.mkdir()
    libraries = Path(av.origin).parent.parent / "av.libs"
    for library in libraries.glob("lib*-*.so.*"):
        name, _, version = library.name.partition(".so.")
        (folder / f"{name.rpartition('-')[0]}.so.{version.partition('.')[0]}").symlink_to(library)
    return {"LD_LIBRARY_PATH": f"{folder}:{libraries}"}


def batches(setup: Setup) -> Batches:
    import spdl.io
    import torch
    from spdl.pipeline import PipelineBuilder

    transfer: Any = None
    if setup.device != "cpu":
        allocator = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
        transfer = spdl.io.cuda_config(device_index=0, allocator=allocator)

    def load(item: tuple[str, int]) -> tuple[bytes, int]:
        return read(item[0]), item[1]

    def decode(item: tuple[bytes, int]) -> tuple[Any, int]:
        packets = spdl.io.demux_image(item[0])
        flip = ",hflip" if random.random() < 0.5 else ""
        size = f"{setup.image_size}:{setup.image_size}:flags=bilinear"
        steps = f"crop={crop(packets.width, packets.height)},scale={size}{flip},format=rgb24"
        return spdl.io.decode_packets(packets, filter_desc=steps), item[1]

    def collate(items: list[tuple[Any, int]]) -> tuple[Any, Any]:
        frames = spdl.io.convert_frames([frame for frame, _ in items])
        buffer = spdl.io.transfer_buffer(frames, device_config=transfer) if transfer else frames
        return spdl.io.to_torch(buffer), torch.tensor([label for _, label in items], device=setup.device)

    builder = PipelineBuilder().add_source(shuffled(images_of(setup.images)))
    readers = setup.threads * READERS if setup.remote else 1
    builder = builder.pipe(load, concurrency=readers).pipe(decode, concurrency=setup.threads)
    builder = builder.aggregate(setup.batch_size).pipe(collate).add_sink(3)
    pipeline = builder.build(num_threads=setup.threads + readers, max_failures=setup.batch_size)
    with pipeline.auto_stop():
        yield from pipeline


def crop(width: int, height: int) -> str:
    """Draw a region as torchvision's RandomResizedCrop does: width, height, left, top."""
    for _ in range(10):
        area, ratio = (
            width * height * random.uniform(0.08, 1),
            math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3))),
        )
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return f"{w}:{h}:{random.randint(0, width - w)}:{random.randint(0, height - h)}"
    return f"{width}:{height}:0:0"
