"""Loaders of clips: those of loader.py, with as many DALI pipelines a GPU as it has engines that decode video.

    micro-batch   0  1  2  3  4  5 ...        of this rank, K = 3
    pipeline      0  1  2  0  1  2 ...        all at work at once, batches handed out in order

An engine decodes one video at a time, and one pipeline waits for all clips of a batch before it begins the next one.
Each pipeline holds two decoded batches before they are resized: 6 MB a frame at 1080p.
"""

import ctypes
from collections.abc import Generator, Iterator
from itertools import cycle, islice, tee
from typing import Any

import torch

from raydali.data.dali_loader import PREFETCHED_BATCHES, DaliLoader
from raydali.data.loader import Batch, Loader, LoaderName, make_loader
from raydali.data.stream import MicroBatch

_H264, _YUV_420 = 4, 1


class PipelinesInTurn(Loader):
    """Some DALI loaders that take the micro-batches in turn; what it yields is what one of them would.

    Args:
        pipelines: K; they share `threads`.
    """

    def __init__(self, *args: Any, pipelines: int, **options: Any) -> None:
        super().__init__(*args, **options)
        options["threads"] = -(-self.threads // pipelines)
        options["prefetched"] = max(2, -(-PREFETCHED_BATCHES // pipelines))
        self._loaders = [DaliLoader(*args, **options) for _ in range(pipelines)]

    def _load(self, micro_batches: Iterator[MicroBatch]) -> Generator[Batch, None, None]:
        copies = tee(micro_batches, len(self._loaders))
        turns = [
            loader._load(islice(copy, turn, None, len(self._loaders)))
            for turn, (loader, copy) in enumerate(zip(self._loaders, copies, strict=True))
        ]
        try:
            for batches in cycle(turns):
                batch = next(batches, None)
                if batch is None:
                    return
                yield batch
        finally:
            for batches in turns:
                batches.close()

    def close(self) -> None:
        """Stop the pipelines."""
        super().close()
        for loader in self._loaders:
            loader.close()


def make_video_loader(name: LoaderName, *args: Any, pipelines: int | None = None, **options: Any) -> Loader:
    """The loader of that name.

    Args:
        name, args, options: as of `make_loader`.
        pipelines: of DALI on this device. Default: one for each of a GPU's engines, or one on the CPU.
    """
    if name != "dali":
        return make_loader(name, *args, **options)
    return PipelinesInTurn(*args, pipelines=pipelines or video_engines(options.get("device", "cpu")), **options)


class _Capabilities(ctypes.Structure):
    """CUVIDDECODECAPS of NVIDIA's Video Codec SDK 12, cuviddec.h."""

    _fields_ = (
        ("codec", ctypes.c_int),
        ("chroma_format", ctypes.c_int),
        ("bit_depth_minus_8", ctypes.c_uint),
        ("reserved_1", ctypes.c_uint * 3),
        ("is_supported", ctypes.c_ubyte),
        ("engines", ctypes.c_ubyte),
        ("output_formats", ctypes.c_ushort),
        ("max_width", ctypes.c_uint),
        ("max_height", ctypes.c_uint),
        ("max_macroblocks", ctypes.c_uint),
        ("min_width", ctypes.c_ushort),
        ("min_height", ctypes.c_ushort),
        ("has_histogram", ctypes.c_ubyte),
        ("counter_bits", ctypes.c_ubyte),
        ("max_bins", ctypes.c_ushort),
        ("reserved_3", ctypes.c_uint * 10),
    )


def video_engines(device: torch.device | str) -> int:
    """How many of a GPU's engines decode H.264: 7 on an H100, 5 on an A100; 1 on the CPU, or if nobody knows."""
    if torch.device(device).type != "cuda":
        return 1
    capabilities = _Capabilities(codec=_H264, chroma_format=_YUV_420)
    try:
        library = ctypes.CDLL("libnvcuvid.so.1")
    except OSError:
        return 1
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # there is a CUDA context from here on
        failed = library.cuvidGetDecoderCaps(ctypes.byref(capabilities))
    return 1 if failed else max(1, capabilities.engines)
