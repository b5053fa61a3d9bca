"""One reading of a picture: whatever a file is, all loaders deliver the same pixels of it, or all leave it out."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import features

from raydali.commands.examine import ask_decoders
from raydali.data.broken.quarantine import Quarantine
from raydali.data.decode.dali_trial import decoded_files, decoded_in_16_bits
from raydali.data.decode.decoder_choice import plain_shape
from raydali.data.decode.pillow import decoded, decoded_pixels, opened, upright_shape
from raydali.data.index.files import Files
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.restoration import WholeImages
from raydali.errors import DataError
from raydali.host.child import Child
from tests.support.messages import mentioning
from tests.support.odd_pictures import ALPHA, COLOURS, HEIGHT, REFUSED, SOUND, TURNED, WIDTH

MUTATIONS = 40
"""Damaged headers of each format."""

Pixels = NDArray[np.uint8]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The sound files, and the refused ones after them."""
    folder = tmp_path_factory.mktemp("pictures")
    contents = SOUND | {f"refused-{name}": data for name, (data, _) in REFUSED.items()}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return Files.from_list(str(folder), [*contents])


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    used = Child("decoder")
    yield used
    used.close()


def read(name: LoaderName, source: Files) -> tuple[dict[str, Pixels], dict[str, str]]:
    """The pixels that a loader delivers, and the reasons why it leaves files out, by file name."""
    quarantine, pixels = Quarantine(len(source)), {}
    order = OrderedPass(samples=len(source), batch_size=1)
    with make_loader(name, source, WholeImages(), order, threads=1, quarantine=lambda _: quarantine) as loader:
        for batch in loader:
            (id,) = batch.ids.tolist()
            pixels[Path(source.path(id)).name] = batch["inputs"][0].permute(1, 2, 0).numpy().copy()
    return pixels, {Path(sample.path).name: sample.reason for sample in quarantine.known.values()}


def test_both_loaders_deliver_the_same_pixels_and_refuse_the_same_files(source: Files) -> None:
    dali, torch = read("dali", source), read("torch", source)
    assert dali[0].keys() == torch[0].keys() == SOUND.keys()
    assert [name for name in SOUND if not np.array_equal(dali[0][name], torch[0][name])] == []
    assert {name for name, pixels in dali[0].items() if pixels.shape == (WIDTH, HEIGHT, 3)} == TURNED
    shapes = {name: upright_shape(data) for name, data in SOUND.items()}
    assert shapes == {name: pixels.shape[:2] for name, pixels in dali[0].items()}
    assert dali[1] == torch[1]
    for name, (_, why) in REFUSED.items():
        assert why in dali[1][f"refused-{name}"]


def test_what_is_plain_dali_decodes_as_pillow_does(child: Child) -> None:
    shapes = {name: plain_shape(memoryview(data)) for name, data in SOUND.items()}
    plain = [name for name, shape in shapes.items() if shape is not None]
    assert {"444.jpg", "orientation-6.jpg", "RGBA.png", "lossy.webp", "RGB.bmp", "RGB.pnm", "lzw.tif"} <= {*plain}
    by_dali = child.call(decoded_files, [SOUND[name] for name in plain])
    for name, pixels in zip(plain, by_dali, strict=True):
        assert not isinstance(pixels, str), f"{name}: {pixels}"
        assert pixels.shape[:2] == shapes[name] and np.array_equal(pixels, decoded_pixels(SOUND[name])), name


@pytest.mark.parametrize(
    ("name", "most"), [("animated.gif", 6), ("transparent.gif", 9), ("animated.avif", 3), ("alpha.avif", 3)]
)
def test_the_first_frame_counts_and_alpha_does_not(name: str, most: float) -> None:
    """A GIF has 256 colours, and an AVIF is lossy; the second frames differ by 60."""
    pixels = decoded_pixels(SOUND[name])
    assert pixels.shape == COLOURS.shape
    opaque = ALPHA >= 128 if name == "transparent.gif" else np.ones_like(ALPHA, bool)
    assert np.abs(pixels.astype(int) - COLOURS)[opaque].mean() < most


def test_an_avif_that_this_pillow_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "check", lambda _: False)
    with pytest.raises(DataError, match=mentioning("AVIF Pillow 11.3")):
        opened(SOUND["picture.avif"])


def test_white_of_12_bits_is_white(child: Child) -> None:
    pixels = np.asarray(decoded(SOUND["12-bits.jp2"]))
    assert (pixels[:4, :4] == 255).all() and (pixels[4:, :4] == 0).all() and (pixels[:, 4:, 0] == 128).all()
    assert child.call(decoded_in_16_bits, SOUND["12-bits.jp2"]).max() == 4095


@pytest.mark.parametrize(
    "name",
    [
        *("444.jpg", "orientation-6.jpg", "exif.png", "lossy-alpha.webp", "lzw.tif", "RGB.bmp", "RGB.pnm"),
        *("animated.gif", "turned.avif"),
    ],
)
def test_a_damaged_header_neither_raises_nor_kills(child: Child, name: str) -> None:
    random, data = np.random.default_rng(0), np.frombuffer(SOUND[name], np.uint8)
    damaged = []
    for _ in range(MUTATIONS):
        changed = data.copy()
        places = random.integers(0, min(len(data), 400), 3)
        changed[places] = random.integers(0, 256, len(places))
        damaged.append(changed[: random.integers(len(data) // 2, 2 * len(data))].tobytes())
    seen = child.call(ask_decoders, damaged)  # a death is an error
    assert [str(each.error) for each in seen if "differently" in str(each.error)] == []


def test_an_empty_file_is_not_plain() -> None:
    assert plain_shape(memoryview(b"")) is None
