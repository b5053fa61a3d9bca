"""Makes a loader of clips by its name: those of make.py, and one that decodes videos with a GPU's video engines."""

from typing import Unpack

import torch

from raydali.data.loading.loader import Loader, LoaderOptions
from raydali.data.loading.make import LoaderName, make_loader
from raydali.data.sources.video.clips import VideoClips
from raydali.data.sources.video.nvdec import capabilities
from raydali.data.stream.stream import Order
from raydali.data.tasks.video import Clips
from raydali.extras import require_dali

_DECODERS_PER_ENGINE = 1.5
"""Measured: fewer leave engines idle, more wait for each other in the interpreter."""


def make_video_loader(
    name: LoaderName,
    source: VideoClips,
    pipeline: Clips,
    order: Order,
    *,
    decoders: int | None = None,
    **options: Unpack[LoaderOptions],
) -> Loader:
    """Make the loader of that name; the other arguments are those of `make_loader`.

    `decoders` is the number of clips that a GPU decodes at once. Default: three for two of its video engines, and no
    fewer than there are threads if FFmpeg has to decode some of the videos.
    """
    device = torch.device(options.get("device", "cpu"))
    if name != "dali" or device.type != "cuda":
        return make_loader(name, source, pipeline, order, **options)
    if decoders is None:
        decoders = max(1, round(_DECODERS_PER_ENGINE * video_engines(device)))
        if not all(capabilities(device, codec).get("supported") for codec in set(source.codecs.tolist())):
            decoders = max(decoders, options.get("threads", 1))
    require_dali("decoding videos on GPUs", "use the loader torch")
    from raydali.data.loading.gpu_clip_loader import GpuClipLoader

    return GpuClipLoader(source, pipeline, order, decoders=decoders, **options)


def video_engines(device: torch.device | str) -> int:
    """Return the number of a GPU's engines that decode H.264: 7 on an H100, 5 on an A100; at least 1."""
    return max(1, capabilities(torch.device(device), "h264").get("num_decoder_engines", 1))
