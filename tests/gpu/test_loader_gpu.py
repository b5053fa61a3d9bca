"""The DALI loader on a GPU: tensors there without a copy through the host, in stream order, nothing kept."""

import time

import pytest
import torch

from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import TrainImages
from tests.support.pictures import encoded, files, photograph

pytestmark = pytest.mark.gpu

STREAM = Stream(samples=64, epochs=4, batch_size=8, global_batch_size=16, seed=1)
TRAIN = TrainImages(image_size=96, seed=3)
SECOND = 2_000_000_000  # clock cycles, about


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    made = {str(i): encoded(photograph(("china", "flower")[i % 2], (300 + i, 290 - i))) for i in range(64)}
    return files(tmp_path_factory.mktemp("images"), **made)


def test_batches_are_the_streams(source: LabeledFiles) -> None:
    cpu = make_loader("dali", source, TRAIN, STREAM, rank=1, world_size=2)
    with (
        cpu,
        make_loader("dali", source, TRAIN, STREAM, rank=1, world_size=2, device="cuda", threads=4) as loader,
    ):
        for batch, expected in zip(loader, cpu, strict=True):
            images, labels = batch["images"], batch["labels"]
            assert images.device.type == labels.device.type == "cuda"
            assert (images.shape, images.dtype, labels.dtype) == ((8, 3, 96, 96), torch.uint8, torch.int64)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert batch.ids.tolist() == expected.ids.tolist()
            assert labels.tolist() == expected["labels"].tolist()
            difference = (images.cpu().float() - expected["images"].float()).abs()
            assert difference.mean((1, 2, 3)).max() < 4


def test_the_host_does_not_wait_for_the_stream(source: LabeledFiles) -> None:
    with make_loader("dali", source, TRAIN, STREAM, device="cuda", threads=4) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        torch.cuda.synchronize()
        time.sleep(0.5)  # for the next batch to be decoded
        torch.cuda._sleep(2 * SECOND)
        asleep = torch.cuda.Event()
        asleep.record()
        next(batches)
        assert not asleep.query()


@pytest.mark.parametrize("ahead", [False, True])
def test_memory_is_reused_in_stream_order(source: LabeledFiles, ahead: bool) -> None:
    with make_loader("dali", source, TRAIN, STREAM, device="cuda", threads=4) as loader:
        expected = [float(batch["images"].sum()) for batch in loader]
        if ahead:
            loader.begin_ahead()
        sums = []
        for batch in loader:
            torch.cuda._sleep(SECOND // 20)
            sums.append(batch["images"].sum())
            del batch
    assert [float(each) for each in sums] == pytest.approx(expected, rel=1e-3)


def test_long_runs_keep_their_memory(source: LabeledFiles) -> None:
    def used() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    stream = Stream(samples=64, epochs=100, batch_size=8, global_batch_size=8, seed=1)
    seen = []
    with make_loader("dali", source, TRAIN, stream, device="cuda", threads=4) as loader:
        for taken, _ in enumerate(loader, 1):
            if taken in (200, 800):
                seen.append(used())
    assert seen[1] - seen[0] < 32 << 20  # a batch is 0.9 MB: 500 MB, were each one kept
