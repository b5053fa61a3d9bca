"""What a GPU's video engines are given and what is made of their frames; in their place FFmpeg decodes here.

tests/gpu/test_video_gpu.py runs the same on a GPU.
"""

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch

from raydali.data.video import nvdec
from raydali.data.video.clips import VideoClips
from raydali.data.video.nvdec import NvdecDecoder
from tests.support.messages import mentioning, mentions
from tests.support.quick import first_quick
from tests.support.videos import alternate_references, moving, write_video

FFMPEG = {"h264": "h264", "hevc": "hevc", "vp8": "vp8", "vp9": "vp9", "mpeg4": "mpeg4"}


class Engine:
    """One of NVIDIA's decoders: it knows what is in the packets and nothing of files; a new size has to be told."""

    def __init__(self, codec: str, obedient: bool) -> None:
        self.codec, self.obedient = codec, obedient
        self.context: Any = None
        self.shape: tuple[int, int] | None = None
        self.sizes_told: list[tuple[int, int]] = []

    def setReconfigParams(self, width: int, height: int) -> None:
        self.sizes_told.append((height, width))
        if self.obedient:
            self.shape = height, width

    def Decode(self, packet: Any) -> list[Any]:
        if self.context is None:
            self.context = av.CodecContext.create(FFMPEG[self.codec], "r")
        if packet.decode_flag:
            frames, self.context = self.context.decode(None), None
        else:
            content = av.Packet(packet.bsl)  # with room behind it, into which FFmpeg reads
            content.update(ctypes.string_at(packet.bsl_data, packet.bsl))
            content.pts = packet.pts
            frames = self.context.decode(content)
        return [self._surface(frame) for frame in frames]

    def _surface(self, frame: Any) -> Any:
        self.shape = self.shape or (frame.height, frame.width)
        pixels = frame.reformat(*self.shape[::-1], format="nv12").to_ndarray()

        class Surface(np.ndarray[Any, Any]):
            def getPTS(self) -> int:
                return int(frame.pts)

        return pixels.copy().view(Surface)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    made: list[Engine] = []

    def new_decoder(_: torch.device, codec: str, *__: int) -> Engine:
        made.append(Engine(codec, obedient=len(made) != 1))
        return made[-1]

    packet = {"decode_flag": 0}
    nvc = SimpleNamespace(PacketData=lambda: SimpleNamespace(**packet), VideoPacketFlag=SimpleNamespace(ENDOFSTREAM=1))
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", nvc)
    monkeypatch.setattr(nvdec, "_new_decoder", new_decoder)
    return made


def clip(decoder: NvdecDecoder, source: VideoClips, id: int) -> torch.Tensor:
    (video,) = source.places(np.array([id]))[0].tolist()
    height, width = source.table.shapes[video].tolist()
    frames = torch.zeros((source.sequence_length, height * 3 // 2, width), dtype=torch.uint8)
    with source.cut(id) as cut:
        for place, frame in decoder.frames(cut, height, width):
            frames[place] = frame
    return frames


def straight(path: Path | str) -> torch.Tensor:
    with av.open(str(path)) as container:
        return torch.from_numpy(np.stack([frame.to_ndarray(format="nv12") for frame in container.decode(video=0)]))


def assert_clips(source: VideoClips, decoder: NvdecDecoder) -> None:
    for id in range(len(source)):
        (video,), (first,) = (part.tolist() for part in source.places(np.array([id])))
        whole = straight(source.videos.path(video))
        wanted = np.minimum(first + source.stride * np.arange(source.sequence_length), len(whole) - 1)
        assert clip(decoder, source, id).equal(whole[wanted]), source.path(id)


@first_quick("stride", [1, 3])
@first_quick(
    ("codec", "ending", "options"),
    [
        ("h264", "mp4", {}),
        ("h264", "ts", {}),
        ("h264", "mkv", {"x264-params": "bframes=3:b-adapt=0:scenecut=0"}),
        ("h264", "mp4", {"x264-params": "bframes=3:b-adapt=0:open-gop=1:scenecut=0"}),
        ("hevc", "mp4", {}),
        ("mpeg4", "avi", {}),
        ("vp9", "webm", {}),
    ],
)
def test_clips_are_decoded_without_the_file_s_header(
    tmp_path: Path, engines: list[Engine], codec: str, ending: str, options: dict[str, str], stride: int
) -> None:
    write_video(tmp_path / "a" / f"1.{ending}", moving(31), codec, keyframe_every=10, options=options)
    source = VideoClips.scan(str(tmp_path), sequence_length=4, stride=stride, step=3)
    assert_clips(source, NvdecDecoder(torch.device("cpu"), codec, 48, 64))
    assert len(engines) == 1 and engines[0].sizes_told == []


@first_quick("codec", ["vp8", "vp9"])
@pytest.mark.usefixtures("engines")
def test_hidden_frames_do_not_count(tmp_path: Path, codec: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.webm").write_bytes(alternate_references(codec).read_bytes())
    source = VideoClips.scan(str(tmp_path), sequence_length=4, step=3)
    assert_clips(source, NvdecDecoder(torch.device("cpu"), codec, 144, 160))


def test_videos_of_several_sizes(tmp_path: Path, engines: list[Engine]) -> None:
    for i, (height, width) in enumerate([(48, 64), (64, 96), (64, 96), (48, 64)]):
        write_video(tmp_path / "a" / f"{i}.mp4", moving(8, height=height, width=width), "h264")
    source = VideoClips.scan(str(tmp_path), sequence_length=4)
    decoder = NvdecDecoder(torch.device("cpu"), "h264", 64, 96)
    assert_clips(source, decoder)
    assert len(engines) == 1 and engines[0].sizes_told == [(64, 96), (48, 64)]
    # One that goes on with the old size is replaced.
    decoder._decoder = Engine("h264", obedient=False)
    decoder._decoder.shape = (48, 64)
    decoder._shape = (48, 64)
    assert_clips(source, decoder)
    assert len(engines) == 3


@pytest.mark.usefixtures("engines")
def test_missing_frames_are_counted(tmp_path: Path) -> None:
    write_video(tmp_path / "a" / "1.mp4", moving(8), "h264")
    source = VideoClips.scan(str(tmp_path), sequence_length=8)
    decoder = NvdecDecoder(torch.device("cpu"), "h264", 48, 64)
    decoder._decoder = SimpleNamespace(Decode=lambda packet: [])
    decoder._shape = (48, 64)
    with pytest.raises(OSError, match=mentioning("1.mp4 0 8")):
        clip(decoder, source, 0)
    assert_clips(source, decoder)


@pytest.mark.parametrize("ended", ["by an error", "by its consumer"])
@pytest.mark.usefixtures("engines")
def test_a_clip_that_was_broken_off_leaves_nothing_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    for i in range(2):
        write_video(tmp_path / "a" / f"{i}.mp4", moving(8, start=8 * i), "h264")
    source = VideoClips.scan(str(tmp_path), sequence_length=8)
    decoder = NvdecDecoder(torch.device("cpu"), "h264", 48, 64)
    if ended == "by an error":
        decode = Engine.Decode

        def failing(self: Engine, packet: Any) -> list[Any]:
            if packet.decode_flag:
                raise RuntimeError("the engine is lost")
            return decode(self, packet)

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the engine is lost"):
            patch.setattr(Engine, "Decode", failing)
            clip(decoder, source, 1)
    else:
        with source.cut(1) as cut:
            next(decoder.frames(cut, 48, 64))
    assert_clips(source, decoder)


def test_a_driver_without_video_engines_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    nvdec._library.cache_clear()
    for codec in ("h264", "hevc", "h264"):
        assert not nvdec.decodable(torch.device("cuda", 0), codec, 144, 256)
    (record,) = caplog.records
    assert mentions(record.getMessage(), "FFmpeg NVENC")
