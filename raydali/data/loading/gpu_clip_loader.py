"""A loader of clips that decodes videos with a GPU's video engines. It is a file of its own, since it imports DALI."""

from typing import Unpack

import torch

from raydali.data.loading.dali_loader import DaliLoader
from raydali.data.loading.loader import LoaderOptions
from raydali.data.sources.video.clips import VideoClips
from raydali.data.stream.stream import Order
from raydali.data.tasks.video import Clips
from raydali.data.tasks.video_gpu import ClipsOnGpu

_PREFETCHED = 2


class GpuClipLoader(DaliLoader):
    """The DALI loader of clips that a GPU decodes.

    Args:
        pipeline: settings, `Clips`.
        decoders: number of clips that are decoded at once.
    """

    def __init__(
        self, source: VideoClips, pipeline: Clips, order: Order, *, decoders: int, **options: Unpack[LoaderOptions]
    ) -> None:
        on_gpu = ClipsOnGpu(pipeline, torch.device(options["device"]), decoders)
        super().__init__(source, on_gpu, order, prefetched=_PREFETCHED, **options)
        self._clips = on_gpu

    def close(self) -> None:
        """Stop decoding, and DALI's threads."""
        super().close()
        self._clips.close()
