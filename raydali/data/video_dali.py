"""The DALI graph of video.py:

    encoded clips --> decode the clip's frames --> resize the crop --> flip
    frames ------------^     starts, ends ------------^       flips ----^

On the CPU DALI decodes VP8, VP9 and MJPEG; on a GPU its video engines decode these and H.264, HEVC, AV1 and MPEG-4.
"""

from typing import Any

from nvidia.dali import fn

from raydali.data.pipeline import Device
from raydali.data.video import Clips
from raydali.data.video_clips import VideoClips
from raydali.errors import UsageError

CPU_CODECS = ("vp8", "vp9", "mjpeg")
GPU_CODECS = (*CPU_CODECS, "h264", "hevc", "av1", "mpeg4")


def clips_graph(
    settings: Clips,
    source: VideoClips,
    contents: Any,
    frames: Any,
    starts: Any,
    ends: Any,
    flips: Any,
    labels: Any,
    *,
    device: Device,
) -> tuple[Any, Any]:
    """`Clips.graph`.

    Raises:
        UsageError: a codec that DALI does not decode there.
    """
    _check_codecs(source, device)
    # Its threads would else be tied to the host's first cores, the same ones in each pipeline.
    where = {"device": "cpu"} if device == "cpu" else {"device": "mixed", "affine": False}
    clips = fn.decoders.video(contents, frames=frames, **where)
    clips = fn.resize(clips, size=[settings.image_size] * 2, roi_start=starts, roi_end=ends)
    clips = fn.flip(clips, horizontal=flips)
    return clips, labels.gpu() if device == "gpu" else labels


def _check_codecs(source: VideoClips, device: Device) -> None:
    known = CPU_CODECS if device == "cpu" else GPU_CODECS
    for video, codec in enumerate(source.codecs.tolist()):
        if codec not in known:
            where = "without a GPU" if codec in GPU_CODECS else "at all"
            remedy = "train on GPUs, or with --loader torch" if codec in GPU_CODECS else "use --loader torch"
            raise UsageError(
                f"DALI does not decode {codec} {where}, such as {source.videos.path(video)}: {remedy}, or convert the "
                f"videos to one of {', '.join(known)}"
            )
