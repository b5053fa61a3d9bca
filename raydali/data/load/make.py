"""Makes a loader by its name, also of clips, and defines `synthetic`: one resident batch again and again."""

from collections.abc import Generator, Iterator
from typing import Any, Literal, Unpack

import torch

from raydali.data.index.source import Source
from raydali.data.load import depths
from raydali.data.load.loader import Batch, Loader, LoaderOptions
from raydali.data.stream.stream import MicroBatch, Order
from raydali.data.tasks.pipeline import Pipeline
from raydali.data.video.clips import VideoClips
from raydali.data.video.nvdec import capabilities
from raydali.data.video.task import Clips
from raydali.extras import require_dali

LoaderName = Literal["dali", "torch", "synthetic"]


class SyntheticLoader(Loader):
    """Hands out one resident batch of noise for every micro-batch."""

    def _load(self, micro_batches: Iterator[MicroBatch]) -> Generator[Batch, None, None]:
        resident: dict[str, torch.Tensor] = {}
        made_by: Pipeline[Any] | None = None
        for micro_batch in micro_batches:
            size, pipeline = len(micro_batch.ids), self.pipeline.in_epoch(micro_batch.counts_to)
            if pipeline != made_by:
                resident, made_by = self.resident_batch(size, micro_batch.counts_to), pipeline
            yield Batch({name: tensor[:size] for name, tensor in resident.items()}, micro_batch)


def make_loader(
    name: LoaderName, source: Source, pipeline: Pipeline[Any], order: Order, **options: Unpack[LoaderOptions]
) -> Loader:
    """Make the loader of that name; see `Loader` for the other arguments."""
    if name == "synthetic":
        return SyntheticLoader(source, pipeline, order, **options)
    if name == "torch":
        from raydali.data.load.torch_loader import TorchLoader

        return TorchLoader(source, pipeline, order, **options)
    require_dali("the loader dali", "use the loader torch")
    from raydali.data.load.dali_loader import DaliLoader

    return DaliLoader(source, pipeline, order, **options)


def make_video_loader(
    name: LoaderName,
    source: VideoClips,
    pipeline: Clips,
    order: Order,
    *,
    decoders: int | None = None,
    **options: Unpack[LoaderOptions],
) -> Loader:
    """Make the loader of that name; see `make_loader` for the other arguments.

    `decoders` is the number of clips that a GPU decodes at once. Default: three for two of its video engines, and no
    fewer than there are threads if FFmpeg has to decode some of the videos.
    """
    device = torch.device(options.get("device", "cpu"))
    if name != "dali" or device.type != "cuda":
        return make_loader(name, source, pipeline, order, **options)
    if decoders is None:
        decoders = max(1, round(depths.DECODERS_PER_ENGINE * video_engines(device)))
        if not all(capabilities(device, codec).get("supported") for codec in set(source.table.codecs.tolist())):
            decoders = max(decoders, options.get("threads", 1))
    require_dali("decoding videos on GPUs", "use the loader torch")
    from raydali.data.load.dali_loader import DaliLoader
    from raydali.data.video.gpu import ClipsOnGpu

    on_gpu = ClipsOnGpu(pipeline, device, decoders)
    loader = DaliLoader(source, on_gpu, order, prefetched=depths.CLIPS, **options)
    loader.on_close = on_gpu.close
    return loader


def video_engines(device: torch.device | str) -> int:
    """Return the number of a GPU's engines that decode H.264: 7 on an H100, 5 on an A100; at least 1."""
    return max(1, capabilities(torch.device(device), "h264").get("num_decoder_engines", 1))
