"""The DALI graphs of video.py, over decoded clips:

    RGB clips -------------> resize the crop --> flip                     on the CPU
    luma, chroma ----------> resize the crop --> RGB --> flip             on a GPU
    starts, ends ------------------^      matrices, offsets ^   flips ^

DALI 2.4.0's own `fn.decoders.video` is not used. It decodes from a file's first frame on, whichever is asked for; and
on a GPU it makes a decoder for each clip, which takes a tenth of a second that all GPUs of a host share.
"""

from typing import Any

from nvidia.dali import fn, types

from raydali.data.tasks.pipeline import Device
from raydali.data.tasks.video import Clips


def clips_graph(
    settings: Clips, clips: Any, starts: Any, ends: Any, flips: Any, labels: Any, *, device: Device
) -> tuple[Any, Any]:
    """`Clips.graph`."""
    clips = fn.reshape(clips.gpu() if device == "gpu" else clips, layout="FHWC")
    clips = fn.resize(clips, size=[settings.image_size] * 2, roi_start=starts, roi_end=ends)
    return fn.flip(clips, horizontal=flips), labels.gpu() if device == "gpu" else labels


def planes_graph(
    settings: Clips,
    luma: Any,
    chroma: Any,
    starts: Any,
    ends: Any,
    matrices: Any,
    offsets: Any,
    flips: Any,
    labels: Any,
    *,
    device: Device,
) -> tuple[Any, Any]:
    """The same from clips as they are coded: luma (frames, height, width, 1), chroma at half the size (..., 2).

    They become RGB behind the resize, where they are small.
    """
    size = [settings.image_size] * 2
    luma, chroma = fn.reshape(luma, layout="FHWC"), fn.reshape(chroma, layout="FHWC")
    luma = fn.resize(luma, size=size, roi_start=starts, roi_end=ends, dtype=types.FLOAT)
    chroma = fn.resize(chroma, size=size, roi_start=starts / 2, roi_end=ends / 2, dtype=types.FLOAT)
    clips = fn.coord_transform(fn.cat(luma, chroma, axis=3), M=matrices, T=offsets)
    clips = fn.reshape(fn.cast(clips, dtype=types.UINT8), layout="FHWC")
    return fn.flip(clips, horizontal=flips), labels.gpu() if device == "gpu" else labels
