"""One reading of a picture on a GPU: of all kinds of files, of many JPEGs, and while long kernels hold its queue."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from raydali.data.broken.quarantine import Quarantine
from raydali.data.index.files import Files
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.data.tasks.restoration import WholeImages
from tests.support.odd_pictures import REFUSED, SOUND, saved

pytestmark = pytest.mark.gpu

JPEG_MEAN, JPEG_MAX = 4.5, 30
"""The largest differences of whole tiny JPEGs, of 8-bit values: GPUs scale the colours of 4:2:0 without a filter."""
PHOTOGRAPH_MEAN = 1.5
"""The largest mean difference of a photograph-like JPEG, resized."""
JPEGS, PICTURES = 20_000, 200
BATCHES = 200


def test_a_gpu_delivers_what_a_cpu_does_of_all_kinds(tmp_path: Path) -> None:
    contents = SOUND | {f"refused-{name}": data for name, (data, _) in REFUSED.items()}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    source, found, reasons = Files.from_list(str(tmp_path), [*contents]), {}, {}
    for device in ("cpu", "cuda"):
        quarantine = Quarantine(len(source))
        order = OrderedPass(samples=len(source), batch_size=1)
        options: dict[str, Any] = {"device": device, "threads": 4, "quarantine": lambda _, known=quarantine: known}
        with make_loader("dali", source, WholeImages(), order, **options) as loader:
            found[device] = {int(batch.ids[0]): batch["inputs"][0].cpu().numpy().astype(int) for batch in loader}
        reasons[device] = {id: sample.reason for id, sample in quarantine.known.items()}
        assert not quarantine.for_pillow
    assert reasons["cpu"] == reasons["cuda"] and found["cpu"].keys() == found["cuda"].keys()
    wrong = []
    for id, expected in found["cpu"].items():
        assert expected.shape == found["cuda"][id].shape, source.path(id)
        difference = np.abs(expected - found["cuda"][id])
        most = (JPEG_MEAN, JPEG_MAX) if source.path(id).endswith(".jpg") else (0, 0)
        print(f"{Path(source.path(id)).name}: mean {difference.mean():.3f}, max {difference.max()}")
        if difference.mean() > most[0] or difference.max() > most[1]:
            wrong.append(Path(source.path(id)).name)
    assert wrong == []


def _write(numbers: tuple[int, ...], folder: str) -> None:
    """Write JPEGs of one picture with 1/f spectrum: sizes, qualities and subsamplings vary."""
    random = np.random.default_rng(numbers[0])
    frequency = np.hypot(np.fft.fftfreq(320)[:, None], np.fft.rfftfreq(400)[None])
    frequency[0, 0] = 1
    noise = random.standard_normal((3, 320, 201)) + 1j * random.standard_normal((3, 320, 201))
    waves = np.fft.irfft2((noise + 2 * noise[:1]) / frequency**1.15, s=(320, 400))
    pixels = np.clip(128 + 50 * waves / waves.std((1, 2), keepdims=True), 0, 255).astype(np.uint8)
    whole = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    for number in numbers:
        size = int(random.integers(100, 400)), int(random.integers(100, 320))
        data = saved(
            whole.crop((0, 0, *size)),
            "JPEG",
            quality=int(random.integers(60, 97)),
            subsampling=int(random.integers(0, 3)),
            progressive=number % 10 == 0,
        )
        place = Path(folder, f"{number % 10}", f"{number:05}.jpg")
        place.parent.mkdir(exist_ok=True, parents=True)
        place.write_bytes(data)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    folder = str(tmp_path_factory.mktemp("photographs"))
    of_each = JPEGS // PICTURES
    parts = [tuple(range(first, first + of_each)) for first in range(0, JPEGS, of_each)]
    with ProcessPoolExecutor(16, get_context("spawn")) as pool:
        [*pool.map(_write, parts, [folder] * len(parts))]
    return LabeledFiles.scan(folder)


def test_many_jpegs_are_alike_on_both(photographs: LabeledFiles) -> None:
    pipeline, order = ValidationImages(image_size=64, resize_size=64), OrderedPass(samples=JPEGS, batch_size=250)
    cpu = make_loader("dali", photographs, pipeline, order, threads=16)
    differences = []
    with cpu, make_loader("dali", photographs, pipeline, order, device="cuda", threads=8) as gpu:
        for expected, batch in zip(cpu, gpu, strict=True):
            assert batch.ids.tolist() == expected.ids.tolist()
            # The outermost pixels differ: DALI's filter repeats pixels at the border.
            inner = [each["images"][..., 2:-2, 2:-2].float().cpu() for each in (expected, batch)]
            differences.append((inner[0] - inner[1]).abs().mean((1, 2, 3)))
    means = torch.cat(differences)
    print(f"median {means.median():.2f}, largest mean {means.max():.2f} of 255 over {len(means)} JPEGs")
    assert len(means) == JPEGS and means.max() < PHOTOGRAPH_MEAN


def sums(source: LabeledFiles, busy: bool) -> NDArray[np.int64]:
    """Checksums of the first batches, which are decoded while the GPU's queue is full of long kernels or not."""
    stream = Stream(samples=len(source), epochs=9, batch_size=256, global_batch_size=256, seed=0)
    found, matrix = [], torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    weights = torch.arange(1, 3 * 96 * 96 + 1, device="cuda", dtype=torch.int64) % 8191
    with make_loader("dali", source, TrainImages(image_size=96, seed=3), stream, device="cuda", threads=8) as loader:
        for number, batch in enumerate(loader):
            if busy:
                for _ in range(8):
                    matrix = (matrix @ matrix).clamp(-1, 1)
            found.append((batch["images"].flatten(1).long() * weights).sum())
            if number + 1 == BATCHES:
                break
    return torch.stack(found).cpu().numpy()


def test_a_busy_gpu_hands_out_no_picture_too_early(photographs: LabeledFiles) -> None:
    idle = sums(photographs, busy=False)
    assert len(np.unique(idle)) == BATCHES
    assert np.array_equal(idle, sums(photographs, busy=True))
