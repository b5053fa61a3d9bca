"""Broken samples on a GPU: found and replaced as on the CPU, and the device goes on."""

from pathlib import Path

import numpy as np
import pytest
import torch

from raydali.data.broken.quarantine import Quarantine
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.loader import LoaderOptions
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import TrainImages
from tests.support.broken import KINDS, folder

pytestmark = pytest.mark.gpu

SAMPLES = 64
BROKEN = {4 * place + 1: kind for place, kind in enumerate(KINDS)}
STREAM = Stream(samples=SAMPLES, epochs=2, batch_size=8, global_batch_size=16, seed=5)
TRAIN = TrainImages(image_size=32, seed=5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    return folder(tmp_path_factory.mktemp("broken"), SAMPLES, BROKEN)


def load(source: LabeledFiles, device: str) -> dict[int, tuple[np.ndarray, torch.Tensor]]:
    """By number of the micro-batch: ids as read, images."""
    quarantine = Quarantine(SAMPLES, seed=STREAM.seed)
    options = LoaderOptions(device=device, threads=4, quarantine=lambda _: quarantine)
    with make_loader("dali", source, TRAIN, STREAM, **options) as loader:
        found = {b.micro_batch.number: (b.micro_batch.read_ids, b["images"].cpu().clone()) for b in loader}
    assert quarantine.known.keys() == BROKEN.keys()
    return found


def test_the_gpu_replaces_as_the_cpu_does(source: LabeledFiles) -> None:
    ours, theirs = load(source, "cuda:0"), load(source, "cpu")
    assert ours.keys() == theirs.keys()
    for number, (ids, images) in ours.items():
        assert ids.tolist() == theirs[number][0].tolist()
        difference = (images.float() - theirs[number][1].float()).abs()
        assert difference.mean() < 3  # nvJPEG's colours are others: test_classification_gpu.py


def test_bytes_that_changed_do_not_end_the_epoch(tmp_path: Path) -> None:
    """Such JPEGs decode for some decoders, to something; what the GPU's refuses must be replaced, and only that."""
    source = folder(tmp_path, SAMPLES, {})
    generator = np.random.default_rng(0)
    changed = [*range(3, SAMPLES, 9)]
    for id in changed:
        path = Path(source.path(id))
        data = bytearray(path.read_bytes())
        for place in generator.integers(len(data) // 3, len(data) - 2, 30):
            data[place] ^= 0x5A
        data[-2:] = b"\xff\xd9"
        path.write_bytes(bytes(data))
    quarantine = Quarantine(SAMPLES, seed=STREAM.seed)
    with make_loader("dali", source, TRAIN, STREAM, device="cuda:0", quarantine=lambda _: quarantine) as loader:
        numbers = [batch.micro_batch.number for batch in loader]
        torch.cuda.synchronize()
    assert numbers == [*range(STREAM.steps * STREAM.micro_batches_per_step)]
    assert quarantine.known.keys() <= {*changed}
