"""What files may hold: which formats are read, what lies behind an image's end, and damage that decoders differ on."""

import os
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from raydali.data.broken.quarantine import Quarantine
from raydali.data.decode.pillow import decoded
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.loader import LoaderOptions
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import Order, Stream
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.errors import DataError
from tests.support.broken import folder
from tests.support.messages import mentioning
from tests.support.pictures import encoded, files, one_batch, photograph

SAMPLES = 24
STREAM = Stream(samples=SAMPLES, epochs=1, batch_size=4, global_batch_size=8, seed=5)
TRAIN = TrainImages(image_size=32, seed=5)
LOADERS: tuple[LoaderName, ...] = ("dali", "torch")

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 60\n%%EndComments\nshowpage\n" + bytes(99)


def giving(known: Quarantine, _: Order) -> Quarantine:
    return known


def used(source: LabeledFiles, name: LoaderName, world_size: int = 1) -> tuple[dict[int, int], Quarantine]:
    """By id, what was read in its place or -1, on all ranks of a run; and what the last of them knows."""
    found: dict[int, int] = {}
    for rank in range(world_size):
        quarantine = Quarantine(len(source), seed=STREAM.seed)
        options = LoaderOptions(rank=rank, world_size=world_size, threads=2, quarantine=partial(giving, quarantine))
        with make_loader(name, source, TRAIN, STREAM, **options) as loader:
            for batch in loader:
                one = batch.micro_batch
                replaced = np.full(len(one.ids), -1) if one.replaced_by is None else one.replaced_by
                found |= dict(zip(one.ids.tolist(), replaced.tolist(), strict=True))
    return found, quarantine


def replaced(source: LabeledFiles, name: LoaderName, world_size: int = 1) -> set[int]:
    return {id for id, other in used(source, name, world_size)[0].items() if other >= 0}


def written(source: LabeledFiles, contents: dict[int, bytes]) -> LabeledFiles:
    for id, content in contents.items():
        Path(source.path(id)).write_bytes(content)
    return source


# ----------------------------------------------------------------------------------------------------------------------
# Formats


@pytest.mark.parametrize("name", LOADERS)
def test_formats_that_are_not_read_are_named_and_replaced(tmp_path: Path, name: LoaderName) -> None:
    heic = b"\0\0\0\x18ftypheic" + bytes(99)
    contents = {5: b"<svg/>", 11: heic, 17: encoded(photograph(size=(60, 50)), "ICO"), 20: EPS}
    source = written(folder(tmp_path, SAMPLES, {}), contents)
    found, quarantine = used(source, name)
    assert {id for id, other in found.items() if other >= 0} == contents.keys()
    if name == "dali":  # the other finds them in its worker processes
        kinds = {5: "an SVG", 11: "a HEIC", 17: "an icon", 20: "an EPS"}
        assert all(quarantine.known[id].reason.startswith(kind) for id, kind in kinds.items())


def test_an_eps_named_jpg_starts_no_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    for program in ("gs", "gswin32c"):
        (tmp_path / program).write_text(f"#!/bin/sh\ntouch {started}\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(DataError, match="PostScript"):
        decoded(EPS)
    assert not started.exists()


def test_checksums_of_png() -> None:
    data = encoded(photograph(size=(40, 30)), "PNG", dpi=(72, 72))

    def spoilt(kind: bytes) -> bytes:
        at = data.index(kind) + 4 + struct.unpack(">I", data[data.index(kind) - 4 : data.index(kind)])[0]
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    with pytest.raises(DataError, match=mentioning("PNG IDAT checksum")):
        decoded(spoilt(b"IDAT"))
    assert decoded(spoilt(b"pHYs")).tobytes() == decoded(data).tobytes()  # as libpng has it


# ----------------------------------------------------------------------------------------------------------------------
# Behind the end


def test_motion_photos_are_sound() -> None:
    random = np.random.default_rng(0)
    photo = encoded(photograph(size=(90, 70)))
    for length in (10_000, 100_000, 1_000_000, 3_000_000):
        for _ in range(10):
            decoded(photo + random.bytes(length))
        with pytest.raises(DataError, match="without its end"):
            decoded(photo[: len(photo) * 9 // 10] + bytes(length))


def test_a_thumbnail_s_end_is_not_the_image_s() -> None:
    photo, thumbnail = encoded(photograph(size=(300, 200))), encoded(photograph(size=(40, 30)))
    inside = b"\xff\xe2" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    whole = photo[:2] + inside + photo[2:]
    decoded(whole)
    with pytest.raises(DataError, match="without its end"):
        decoded(whole[: len(whole) * 9 // 10])


def test_photos_with_a_trailer_are_not_decoded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path, SAMPLES, {})
    random = np.random.default_rng(1)
    for id in range(SAMPLES):
        with Path(source.path(id)).open("ab") as file:
            file.write(random.bytes(40 if id % 2 else 5_000))
    asked: list[int] = []
    monkeypatch.setattr(TrainImages, "sample", lambda *arguments: asked.append(arguments[2]))
    assert replaced(source, "dali") == set() and asked == []


# ----------------------------------------------------------------------------------------------------------------------
# Damage that one decoder takes and the other does not


def damaged(kind: str, takes: Callable[[bytes], bool], **options: object) -> Iterator[bytes]:
    """Files with a byte changed, such that Pillow refuses them, and `takes` does not."""
    data, random = encoded(photograph(size=(90, 70)), kind, **options), np.random.default_rng(0)
    while True:
        content = bytearray(data)
        content[int(random.integers(len(data) // 3, len(data)))] = 255
        try:
            decoded(bytes(content))
        except Exception:
            if takes(bytes(content)):
                yield bytes(content)


def dali_takes(data: bytes) -> bool:
    import nvidia.dali as dali
    from nvidia.dali import fn

    pipeline = dali.Pipeline(batch_size=1, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(fn.decoders.image(fn.external_source([[np.frombuffer(data, np.uint8)]])))
    pipeline.build()
    try:
        pipeline.run()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "options", "is_broken"),
    [("TIFF", {"compression": "tiff_lzw"}, True), ("TIFF", {"compression": "tiff_deflate"}, True), ("JPEG", {}, False)],
)
def test_damage_is_judged_alike_on_any_number_of_ranks(
    tmp_path: Path, kind: str, options: dict[str, object], is_broken: bool
) -> None:
    contents = damaged(kind, dali_takes, **options)
    places = (3, 8, 14, 21)
    source = written(folder(tmp_path, SAMPLES, {10: "text"}), {id: next(contents) for id in places})
    expected = {10, *places} if is_broken else {10}
    assert [replaced(source, "dali", ranks) for ranks in (1, 2)] == [expected, expected]


def test_what_was_read_as_a_whole_is_remembered(tmp_path: Path) -> None:
    source = folder(tmp_path, 8, {})
    written(source, {id: encoded(photograph(size=(60, 50)), "TIFF") for id in range(8)})
    stream = Stream(samples=8, epochs=3, batch_size=4, global_batch_size=4, seed=0)
    read: list[int] = []

    class Counted(TrainImages):
        def sample(self, source: object, id: int, epoch: int) -> tuple[torch.Tensor, ...]:
            read.append(id)
            return ()

    first, second = Quarantine(8, seed=0), Quarantine(8, seed=0)
    for quarantine in (first, second):
        with make_loader(
            "dali", source, Counted(image_size=16, seed=0), stream, quarantine=partial(giving, quarantine)
        ) as loader:
            list(loader)
        assert sorted(read) == [*range(8)]  # once in three epochs, and not again by who was told
        second.add_sound(first.sound_news())
    assert first.sound_news() == [] and first.sound.all() and second.sound.all()


# ----------------------------------------------------------------------------------------------------------------------
# Shapes


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """This process may have so many bytes more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_thin_images_cost_no_more_memory_than_others(tmp_path: Path) -> None:
    column = np.linspace(0, 255, 20_000).astype(np.uint8)[:, None, None].repeat(3, 2)
    thin = {"column": column, "row": column.swapaxes(0, 1)}
    source = files(
        tmp_path / "thin", **{name: encoded(Image.fromarray(pixels), "PNG") for name, pixels in thin.items()}
    )
    pipeline = ValidationImages(image_size=224, resize_size=256)
    sound = files(tmp_path / "sound", small=encoded(photograph(size=(60, 50))))
    one_batch(pipeline, sound), pipeline.sample(sound, 0, 0)  # what is loaded and built once
    with at_most(1_000_000_000):  # 20,000 x 1 pixels, resized as a whole: 3.9 GB
        ours, theirs = one_batch(pipeline, source)[0], [pipeline.sample(source, id, 0)[0] for id in range(2)]
    assert torch.equal(ours, torch.stack(theirs))
    middle = column[10_000, 0, 0]
    assert (ours.float() - float(middle)).abs().max() <= 2
