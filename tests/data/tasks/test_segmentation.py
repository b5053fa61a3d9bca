"""Images and masks are cut alike: no class blends, both loaders agree, and everything depends on ids alone."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from raydali.data.broken.quarantine import Quarantine
from raydali.data.index.masked_images import IGNORED, MaskedImages, train_and_val
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import Once, OrderedPass, Stream
from raydali.data.tasks.segmentation import TrainImages, ValidationImages
from raydali.errors import DataError, UsageError
from tests.support.messages import mentioning

CLASSES = 5


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> MaskedImages:
    """Images of 24 sizes whose colour says the class of each pixel: 40 times the class in red, stripes of 8 pixels."""
    root = tmp_path_factory.mktemp("masked")
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for i in range(24):
            height, width = draw.integers(40, 120, 2).tolist()
            stripes = (np.add.outer(np.arange(height) // 8, np.arange(width) // 8) % CLASSES).astype(np.uint8)
            image = np.stack([40 * stripes, *draw.integers(0, 255, (2, height, width))], 2).astype(np.uint8)
            for kind, pixels in (("images", image), ("masks", stripes)):
                path = root / split / kind / f"{i:02}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    train, _ = train_and_val(str(root), classes=str(CLASSES))
    return train


def pipeline(**given: Any) -> TrainImages:
    settings: dict[str, Any] = {"canvas": (48, 64), "base_size": 60, "seed": 3}
    return TrainImages(**settings | given)


def loaded(source: MaskedImages, made: Any, loader: LoaderName, epochs: int = 1) -> dict[int, tuple[torch.Tensor, ...]]:
    order = Once([(id, epoch) for epoch in range(epochs) for id in range(len(source))])
    found: dict[int, tuple[torch.Tensor, ...]] = {}
    with make_loader(loader, source, made, order, threads=2) as batches:
        for batch in batches:
            rows = zip(batch["images"], batch["masks"], strict=True)
            found |= {len(found) + i: row for i, row in enumerate(rows)}
    return found


def test_both_loaders_cut_the_same(source: MaskedImages) -> None:
    made = pipeline(jitter=0.3)
    dali, pillow = (loaded(source, made, name, epochs=2) for name in ("dali", "torch"))
    assert len(dali) == len(pillow) == 48
    for key in dali:
        (image, mask), (other, truth) = dali[key], pillow[key]
        assert image.shape == (3, 48, 64) and mask.shape == (1, 48, 64) and mask.dtype == torch.uint8
        assert torch.equal(mask, truth)
        assert (image.int() - other.int()).abs().max() <= 3


def test_no_class_blends_and_the_mask_lies_on_the_image(source: MaskedImages) -> None:
    """Away from the borders of stripes, red tells the class; where the image does not reach, the mask is ignored."""
    for image, mask in loaded(source, pipeline(), "dali", epochs=3).values():
        values = set(mask.unique().tolist())
        assert values <= {*range(CLASSES), IGNORED}
        red, truth = image[0].float(), mask[0]
        ignored = truth == IGNORED
        grey = (image[0] == 124) & (image[1] == 116) & (image[2] == 104)
        assert grey[ignored].all()
        told = (red / 40).round()
        inside = torch.ones_like(ignored)
        inside[1:-1, 1:-1] = False
        same = [(truth == truth.roll(shift, axis)) for axis in (0, 1) for shift in (1, -1, 2, -2)]
        flat = torch.stack(same).all(0) & ~ignored & ~inside
        if flat.any():
            assert (told[flat] == truth[flat]).float().mean() > 0.98


def test_draws_depend_on_seed_epoch_and_id_alone(source: MaskedImages) -> None:
    made = pipeline()
    whole, one = loaded(source, made, "torch"), made.sample(source, 5, 0)
    assert all(torch.equal(a, b) for a, b in zip(whole[5], one, strict=True))
    other = made.sample(source, 5, 1), pipeline(seed=4).sample(source, 5, 0)
    assert not any(torch.equal(each[0], one[0]) for each in other)
    plain = pipeline(scales=(1.0, 1.0), flip_probability=0.0, canvas=(200, 200))
    assert torch.equal(plain.sample(source, 5, 0)[0], plain.sample(source, 5, 7)[0]), "nothing is left to chance"


def test_windows_stay_within_the_images() -> None:
    made, draw = pipeline(scales=(0.2, 4.0)), np.random.default_rng(1)
    shapes = draw.integers(1, 500, (5000, 2))
    starts, sizes, small = made.windows(shapes, draw.random((5000, 7)))
    assert (starts >= 0).all() and (sizes >= 1).all() and (starts + sizes <= shapes).all()
    assert (small >= 1).all() and (small <= np.array(made.canvas)).all()
    scale = small / sizes
    near = (np.abs(scale[:, 0] / scale[:, 1] - 1) < 0.35) | (sizes.min(1) < 8) | (small.min(1) < 8)
    assert near.all(), "the aspect is kept"


def test_validation_shows_whole_images(source: MaskedImages) -> None:
    made = ValidationImages(canvas=(128, 128))
    dali, pillow = (loaded(source, made, name) for name in ("dali", "torch"))
    for id in range(len(source)):
        truth = source.mask(id)
        height, width = truth.shape
        for image, mask in (dali[id], pillow[id]):
            assert np.array_equal(mask[0, :height, :width].numpy(), truth)
            assert (mask[0, height:] == IGNORED).all() and (mask[0, :, width:] == IGNORED).all()
            assert torch.equal(image[0, :height, :width], torch.from_numpy(40 * truth))
    small = ValidationImages(canvas=(48, 48))
    order = OrderedPass(samples=len(source), batch_size=4)
    with (
        pytest.raises(DataError, match=mentioning("more than 48x48 --val-size")),
        make_loader("dali", source, small, order) as batches,
    ):
        list(batches)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[MaskedImages, MaskedImages]:
    """Two equal sets of a broken mask of each kind, the first 12, and 12 sound ones."""
    root, draw = tmp_path_factory.mktemp("damaged"), np.random.default_rng(0)

    def content(mask: Image.Image, **options: Any) -> bytes:
        buffer = io.BytesIO()
        mask.save(buffer, "PNG", **options)
        return buffer.getvalue()

    def sound(size: tuple[int, int] = (150, 140)) -> Image.Image:
        return Image.fromarray(draw.integers(0, CLASSES, size, dtype=np.uint8))

    def idat(data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + b"IDAT" + data + struct.pack(">I", zlib.crc32(b"IDAT" + data))

    whole = content(sound(), compress_level=0)
    at, end = whole.index(b"IDAT") + 4, len(whole) - 16
    split = whole[: at - 8] + idat(whole[at : at + 9000]) + idat(whole[at + 9000 : end]) + whole[-12:]
    second = split.rindex(b"IDAT")
    masks = [
        split[: second - 2048] + bytes(4096) + split[second + 2048 :],  # Pillow raises a SyntaxError
        whole[:-900],
        whole[: len(whole) // 2] + bytes(8),
        b"",
        b"<html>404</html>",
        content(sound().point(lambda _: IGNORED)),
        content(sound().point(lambda _: 77)),
        content(sound().convert("RGB")),
        content(sound().convert("LA")),
        content(Image.fromarray(np.full((150, 140), 60000, np.uint16))),
        content(sound((150, 141))),
        None,
    ]
    for part in ("train", "val"):
        for i in range(24):
            for kind in ("images", "masks"):
                path = root / part / kind / f"{i:02}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content(Image.new("RGB", (140, 150), (i, 9, 9)) if kind == "images" else sound()))
    train, val = train_and_val(str(root), classes=str(CLASSES))
    for part in ("train", "val"):
        for i, mask in enumerate(masks):
            path = root / part / f"masks/{i:02}.png"
            path.unlink() if mask is None else path.write_bytes(mask)
    return train, val


@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_each_broken_mask_is_replaced_in_training_and_left_out_of_validation(
    loader: LoaderName, damaged: tuple[MaskedImages, MaskedImages]
) -> None:
    broken = damaged[0]
    stream, known = Stream(samples=24, epochs=1, batch_size=2, global_batch_size=2, seed=0), Quarantine(24, seed=0)
    with make_loader(loader, broken, pipeline(), stream, quarantine=lambda _: known) as batches:
        replaced = [batch.micro_batch.replaced for batch in batches]
    assert sum(replaced) == 12 and {*known.known} == {*range(12)}
    assert all(known.known[id].reason for id in range(12)), "each has a reason"
    known, whole = Quarantine(24), OrderedPass(samples=24, batch_size=4)
    canvas = ValidationImages(canvas=(160, 160))
    with make_loader(loader, damaged[1], canvas, whole, quarantine=lambda _: known) as batches:
        assert sorted(id for batch in batches for id in batch.ids.tolist()) == [*range(12, 24)]
    assert {*known.known} == {*range(12)}
    with (
        pytest.raises(DataError, match=mentioning("masks/00.png")),
        make_loader(loader, broken, canvas, whole) as strict,
    ):
        list(strict)  # without a quarantine, as for `raydali preview`


@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_an_error_that_no_sample_causes_is_raised_as_it_is(loader: LoaderName, source: MaskedImages) -> None:
    class Faulty(TrainImages):
        def draws(self, ids: Any, epochs: Any) -> Any:
            if len(ids) != 1 or loader == "torch":  # `sample`, by which samples are judged, gets one
                raise MemoryError("no room")
            return super().draws(ids, epochs)

    stream, known = Stream(samples=24, epochs=1, batch_size=2, global_batch_size=2, seed=0), Quarantine(24, seed=0)
    made = Faulty(canvas=(48, 64), base_size=60, seed=3)
    with (
        pytest.raises(MemoryError, match="no room"),
        make_loader(loader, source, made, stream, quarantine=lambda _: known) as batches,
    ):
        list(batches)
    assert not known.known


def test_settings_out_of_their_range_are_refused() -> None:
    for wrong in (
        {"canvas": (0, 5)},
        {"scales": (2.0, 1.0)},
        {"scales": (0.0, 1.0)},
        {"jitter": 2.0},
        {"base_size": 0},
    ):
        with pytest.raises(UsageError):
            pipeline(**wrong)
