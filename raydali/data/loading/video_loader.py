"""Loaders of clips: those of loader.py, and one that decodes videos with a GPU's video engines."""

from typing import Unpack

import torch

from raydali.data.loading.dali_loader import DaliLoader
from raydali.data.loading.loader import Loader, LoaderOptions
from raydali.data.loading.make import LoaderName, make_loader
from raydali.data.sources.video.clips import VideoClips
from raydali.data.sources.video.nvdec import capabilities
from raydali.data.stream.stream import Order
from raydali.data.tasks.video import Clips

_PREFETCHED = 2
_DECODERS_PER_ENGINE = 1.5
"""Measured: fewer leave engines idle, more wait for each other in the interpreter."""


class GpuClipLoader(DaliLoader):
    """The DALI loader of clips that a GPU decodes.

    Args:
        pipeline: settings, `Clips`.
        decoders: number of clips that are decoded at once.
    """

    def __init__(
        self, source: VideoClips, pipeline: Clips, order: Order, *, decoders: int, **options: Unpack[LoaderOptions]
    ) -> None:
        from raydali.data.tasks.video_gpu import ClipsOnGpu

        on_gpu = ClipsOnGpu(pipeline, torch.device(options["device"]), decoders)
        super().__init__(source, on_gpu, order, prefetched=_PREFETCHED, **options)
        self._clips = on_gpu

    def close(self) -> None:
        """Stop decoding, and DALI's threads."""
        super().close()
        self._clips.close()


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
    return GpuClipLoader(source, pipeline, order, decoders=decoders, **options)


def video_engines(device: torch.device | str) -> int:
    """Return the number of a GPU's engines that decode H.264: 7 on an H100, 5 on an A100; at least 1."""
    return max(1, capabilities(torch.device(device), "h264").get("num_decoder_engines", 1))
