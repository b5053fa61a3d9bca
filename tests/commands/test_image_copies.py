"""Images stored smaller: every kind of file that Pillow reads, as the loaders see it."""

import io
from functools import partial
from typing import Any

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn
from PIL import ExifTags, Image

from raydali.commands.image_copies import downscale
from raydali.data.broken.quarantine import why_broken
from raydali.data.decode.pillow import decoded
from raydali.errors import DataError
from tests.support.broken import CONTENTS, jpeg
from tests.support.pictures import oriented, photograph

SIZE = 320, 214
SIDE = 120


def picture(mode: str) -> Image.Image:
    image = photograph(size=SIZE)
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    if mode.endswith("A"):
        image = image.convert("RGBA")
        image.putalpha(Image.linear_gradient("L").resize(SIZE))
    return image.convert(mode)


def file(mode: str, kind: str, orientation: int = 1, **options: Any) -> bytes:
    data = io.BytesIO()
    picture(mode).save(data, kind, **({"exif": oriented(orientation)} if orientation != 1 else {}), **options)
    return data.getvalue()


def by_dali(data: bytes) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    graph = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with graph:
        content = fn.external_source(lambda: [np.frombuffer(data, np.uint8)])
        graph.set_outputs(fn.decoders.image(content, device="cpu"))
    graph.build()
    return np.array(graph.run()[0][0])


def difference(a: Image.Image, b: Image.Image, size: tuple[int, int]) -> float:
    """Mean, of 255, at this size."""
    one, other = (np.asarray(image.resize(size, Image.Resampling.BILINEAR), np.float32) for image in (a, b))
    return float(np.abs(one - other).mean())


@pytest.mark.parametrize(
    ("mode", "kind", "options", "becomes"),
    [
        ("RGB", "JPEG", {}, ("JPEG", "RGB")),
        ("RGB", "JPEG", {"progressive": True, "subsampling": 0}, ("JPEG", "RGB")),
        ("L", "JPEG", {}, ("JPEG", "L")),
        ("CMYK", "JPEG", {}, ("JPEG", "RGB")),
        pytest.param(
            *("RGB", "MPO", {"save_all": True, "append_images": [Image.new("RGB", SIZE)]}, ("JPEG", "RGB")),
            id="RGB-MPO",
        ),
        ("RGB", "PNG", {}, ("PNG", "RGB")),
        ("RGBA", "PNG", {}, ("PNG", "RGB")),
        ("LA", "PNG", {}, ("PNG", "L")),
        ("P", "PNG", {}, ("PNG", "RGB")),
        ("P", "PNG", {"transparency": 3}, ("PNG", "RGB")),
        ("1", "PNG", {}, ("PNG", "L")),
        ("I;16", "PNG", {}, ("PNG", "L")),
        ("RGB", "WEBP", {}, ("WEBP", "RGB")),
        ("RGBA", "WEBP", {"lossless": True}, ("WEBP", "RGB")),
        ("RGB", "BMP", {}, ("BMP", "RGB")),
        ("L", "PPM", {}, ("PPM", "L")),
        ("RGB", "TIFF", {}, ("TIFF", "RGB")),
        ("CMYK", "TIFF", {}, ("TIFF", "RGB")),
        ("I;16", "TIFF", {}, ("TIFF", "L")),
        ("P", "GIF", {}, ("PNG", "RGB")),
    ],
    ids=str,
)
def test_formats_and_modes(mode: str, kind: str, options: dict[str, Any], becomes: tuple[str, str]) -> None:
    data = file(mode, kind, **options)
    made = downscale(data, SIDE, 90)
    assert made is not None and (len(made) < len(data) or mode in "P1")
    opened = Image.open(io.BytesIO(made))
    assert (opened.format, opened.mode, opened.size) == (*becomes, (179, SIDE))
    limit = 4 if mode == "1" else 2.5 if kind in ("JPEG", "MPO", "WEBP") else 1.2  # bilevel ones are dithered
    assert difference(decoded(made), decoded(data), (90, 60)) < limit
    assert np.array_equal(by_dali(made), np.asarray(decoded(made)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(kind: str, orientation: int) -> None:
    data = file("RGB", kind, orientation)
    made = downscale(data, SIDE, 90)
    assert made is not None
    assert Image.open(io.BytesIO(made)).getexif().get(ExifTags.Base.Orientation, 1) == 1
    upright, size = decoded(made), (90, 60) if orientation < 5 else (60, 90)
    assert upright.size == ((179, SIDE) if orientation < 5 else (SIDE, 179))
    assert difference(upright, decoded(data), size) < 2.5


def test_metadata_and_what_lies_behind_are_left_out() -> None:
    data = file("RGB", "PNG", icc_profile=bytes(5000), dpi=(300, 300))
    made = downscale(data, SIDE, 90)
    assert made is not None and Image.open(io.BytesIO(made)).info == {}


@pytest.mark.parametrize("size", [(1601, 1203), (1203, 1601), (997, 2000), (640, 427), (243, 241), (4000, 241)])
def test_odd_sizes(size: tuple[int, int]) -> None:
    """Those large enough are decoded at a fraction: nothing is shifted, though their sides are no multiples."""
    image = photograph("flower", size)
    data = io.BytesIO()
    image.save(data, "JPEG", quality=92)
    made = downscale(data.getvalue(), 240, 90)
    assert made is not None
    small = decoded(made)
    assert min(small.size) == 240
    assert max(small.size) == round(240 * max(size) / min(size))
    model = tuple(round(224 * side / min(size)) for side in size)
    assert difference(small, image, (model[0], model[1])) < 2.5
    by_hand = image.resize(small.size, Image.Resampling.LANCZOS)
    width, height = small.size
    a_pixel_off = by_hand.crop((1, 1, width + 1, height + 1))
    assert 2 * difference(small, by_hand, small.size) < difference(small, a_pixel_off, small.size)


def test_what_is_not_above_stays() -> None:
    for data in (file("RGB", "JPEG", 6), file("P", "PNG")):
        assert downscale(data, 214, 90) is None and downscale(data, 215, 90) is None
        assert downscale(data, 213, 90) is not None


def test_values_of_no_known_range_are_refused() -> None:
    with pytest.raises(DataError, match="floats up to"):
        downscale(file("F", "TIFF"), SIDE, 90)


def test_one_pixel() -> None:
    made = downscale(file("RGB", "JPEG"), 1, 90)
    assert made is not None and decoded(made).size == (1, 1)
    line = io.BytesIO()
    Image.new("RGB", (5, 900)).save(line, "PNG")
    made = downscale(line.getvalue(), 2, 90)
    assert made is not None and decoded(made).size == (2, 360)


def test_quality() -> None:
    for kind in ("JPEG", "WEBP"):
        sizes = [len(downscale(file("RGB", kind), SIDE, quality) or b"") for quality in (1, 50, 100)]
        assert sizes == sorted(sizes) and sizes[0] < 0.5 * sizes[2]
    lossless = [downscale(file("RGB", "WEBP", lossless=True), SIDE, quality) for quality in (1, 100)]
    assert len({decoded(made or b"").tobytes() for made in lossless}) == 1


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("side", [40, 300, 2000], ids=["at-a-fraction", "whole", "stays"])
def test_broken_is_what_cannot_be_decoded(kind: str, side: int) -> None:
    data = CONTENTS[kind](jpeg((701, 603)))
    reason = why_broken(partial(decoded, data))
    assert reason is not None and why_broken(partial(downscale, data, side, 90)) == reason
