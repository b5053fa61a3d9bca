"""Decodes files by DALI and nothing else, to learn which of them it refuses; runs in child processes.

It imports no torch: a child process is ready after half a second.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import nvidia.dali as dali
from numpy.typing import NDArray
from nvidia.dali import fn

_PLACE = re.compile(r"sample #(\d+)")
_CAUSE = re.compile(r"encountered:\s*(.*?)\s*(Current pipeline object|$)", re.DOTALL)
_kept: dict[tuple[int | None, Any], "_Decoder"] = {}


class _Decoder:
    """A DALI pipeline that decodes the contents of files as they are.

    Args:
        gpu: the number of the GPU that decodes; None: the CPU does.
        type: of the pixels.
        threads: number of threads.
    """

    def __init__(self, gpu: int | None, type: Any, threads: int) -> None:  # noqa: ANN401 (DALI's)
        self._gpu, self._type, self._threads, self._batch_size = gpu, type, threads, 0
        self._pipeline: dali.Pipeline | None = None

    def decoded(self, files: Sequence[bytes]) -> Any:  # noqa: ANN401 (DALI's list of tensors)
        """Return upright RGB images. Raises RuntimeError if DALI refuses any of them."""
        if self._pipeline is None or len(files) > self._batch_size:
            self._batch_size = max(len(files), self._batch_size)
            self._pipeline = dali.Pipeline(
                batch_size=self._batch_size, num_threads=self._threads, device_id=self._gpu, prefetch_queue_depth=1
            )
            with self._pipeline as pipeline:
                device = "cpu" if self._gpu is None else "mixed"
                contents = fn.external_source(name="files", device="cpu")
                pipeline.set_outputs(fn.decoders.image(contents, device=device, dtype=self._type))
            self._pipeline.build()
        self._pipeline.feed_input("files", [np.frombuffer(file, np.uint8) for file in files])
        try:
            return self._pipeline.run()[0]
        except RuntimeError:
            self._pipeline = None  # it is of no more use
            raise


def _decoder(gpu: int | None, type: Any, threads: int) -> _Decoder:  # noqa: ANN401
    return _kept.setdefault((gpu, type), _Decoder(gpu, type, threads))


def decoded_in_16_bits(file: bytes) -> NDArray[np.uint16]:
    """Return the pixels (H, W, 3) of a file as DALI reads them on the CPU, which does not scale them."""
    return np.asarray(_decoder(None, dali.types.UINT16, 1).decoded([file])[0])


def refused(files: Sequence[bytes], gpu: int | None, threads: int) -> dict[int, str]:
    """Return why DALI refuses files, by their place in the list.

    Args:
        files: their contents.
        gpu: the number of the GPU that decodes; None: the CPU does.
        threads: number of threads.
    """
    seen = _each(files, _decoder(gpu, dali.types.UINT8, threads))
    return {place: reason for place, reason in seen if isinstance(reason, str)}


def decoded_files(files: Sequence[bytes]) -> list[NDArray[np.uint8] | str]:
    """Decode files on the CPU as one batch. Returns the pixels (H, W, 3) of each, or why DALI refuses it."""
    seen = dict(_each(files, _decoder(None, dali.types.UINT8, 1)))
    return [result if isinstance(result, str) else np.array(result) for _, result in sorted(seen.items())]


def _each(files: Sequence[bytes], decoder: _Decoder) -> Iterator[tuple[int, Any]]:
    """Yield the place of each file, and its image in the memory of DALI's batch, or why DALI refuses it."""
    waiting, alone = [*range(len(files))], False
    while waiting:
        part = waiting[:1] if alone else waiting
        try:
            images = decoder.decoded([files[place] for place in part])
        except RuntimeError as error:
            match = _PLACE.search(str(error))
            place = int(match[1]) if match is not None and not alone else 0
            alone = alone or match is None or place >= len(part)  # DALI does not say which one it is
            if not alone or len(part) == 1:
                yield part[place], cause_of(error)
                waiting = [other for other in waiting if other != part[place]]
        else:
            yield from ((place, images[number]) for number, place in enumerate(part))
            waiting = [place for place in waiting if place not in part]


def cause_of(error: RuntimeError) -> str:
    """Return the cause of an error of DALI on one line, without the graph's traceback before it."""
    match = _CAUSE.search(str(error))
    return " ".join((match[1] if match else str(error)).split())
