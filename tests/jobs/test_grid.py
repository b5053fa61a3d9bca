"""jobs/grid.py: five named tensors of each image, by a numpy or a torch function inside the DALI graph."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import fn
from PIL import Image

from jobs import grid
from jobs.grid import Grid, quarters
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.loader import Batch
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import Stream
from raydali.errors import DataError
from tests.support.messages import mentioning, mentions
from tests.support.pictures import encoded, files, photograph

COLOURS = {"left_top": (255, 0, 0), "right_top": (0, 255, 0), "left_bottom": (0, 0, 255), "right_bottom": (9, 99, 199)}
STREAM = Stream(samples=14, epochs=1, batch_size=2, global_batch_size=6, seed=0)


class TorchGrid(Grid):
    """The same by a function of torch tensors."""

    def graph(self, source: Any, *inputs: Any, device: str) -> tuple[Any, ...]:
        def cut(image: np.ndarray) -> tuple[np.ndarray, ...]:
            rows = torch.from_numpy(image).tensor_split((image.shape[0] // 2,))
            return tuple(part.numpy() for row in rows for part in row.tensor_split((image.shape[1] // 2,), 1))

        image = fn.decoders.image(inputs[0])
        parts: Any = fn.python_function(image, function=cut, num_outputs=4, output_layouts="HWC")
        return *(fn.resize(part, size=(112, 112)) for part in (image, *parts)), inputs[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    """Photographs of odd and even sides; the last image has a colour in each quarter."""
    made = {str(i): encoded(photograph(("china", "flower")[i % 2], (131 + i, 160 - i))) for i in range(13)}
    colours = np.array([*COLOURS.values()], np.uint8).reshape(2, 2, 3).repeat(30, 0).repeat(40, 1)
    return files(tmp_path_factory.mktemp("images"), **made, last=encoded(Image.fromarray(colours), "PNG"))


def batches(
    source: LabeledFiles, pipeline: Grid, name: LoaderName = "dali", world_size: int = 1, device: str = "cpu"
) -> Iterator[Batch]:
    for rank in range(world_size):
        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "device": device}
        with make_loader(name, source, pipeline, STREAM, **options) as loader:
            yield from loader


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_sample_once_as_named_tensors(world_size: int, source: LabeledFiles) -> None:
    ids = []
    for batch in batches(source, Grid(), world_size=world_size):
        assert tuple(batch.tensors) == ("whole", *COLOURS, "labels")
        assert all(batch[name].shape == (2, 3, 112, 112) for name in ("whole", *COLOURS))
        assert all(batch[name].dtype == torch.uint8 for name in ("whole", *COLOURS))
        assert batch["labels"].tolist() == batch.ids.tolist()
        ids += batch.ids.tolist()
    assert len(ids) == len(set(ids)) == 12


def test_each_quarter_comes_once(source: LabeledFiles) -> None:
    """The function that this example goes back to gave the left bottom twice, and no right bottom."""
    image = np.arange(5 * 7).reshape(5, 7, 1)
    assert sorted(np.concatenate([part.ravel() for part in quarters(image)])) == [*range(5 * 7)]
    for name, part in zip(COLOURS, Grid().sample(source, 13, 0)[1:5], strict=True):
        assert part[:, 56, 56].tolist() == list(COLOURS[name])


@pytest.mark.parametrize(
    ("pipeline", "device"),
    [(Grid(), "cpu"), (TorchGrid(), "cpu"), pytest.param(Grid(), "cuda:0", marks=pytest.mark.gpu)],
)
def test_pixels_are_those_of_the_sample(pipeline: Grid, device: str, source: LabeledFiles) -> None:
    for batch in batches(source, pipeline, device=device):
        assert all(tensor.device == torch.device(device) for tensor in batch.tensors.values())
        for i, id in enumerate(batch.ids.tolist()):
            *parts, label = Grid().sample(source, id, 0)
            for name, part in zip(("whole", *COLOURS), parts, strict=True):
                # But for the border, which DALI's filter repeats.
                difference = (batch[name][i].cpu().float() - part.float()).abs()[:, 2:-2, 2:-2]
                assert difference.max() < 12 and difference.mean() < 0.6, (id, name)
            assert batch["labels"][i] == label


def test_the_torch_loader_gives_the_same_samples(source: LabeledFiles) -> None:
    (first, *_), (other, *_) = batches(source, Grid()), batches(source, Grid(), "torch")
    assert first.ids.tolist() == other.ids.tolist() and first.tensors.keys() == other.tensors.keys()
    assert (first["right_bottom"].float() - other["right_bottom"].float()).abs().mean() < 0.6


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    good = encoded(photograph(size=(90, 60)))
    broken = files(tmp_path, **{str(i): good if i != 4 else good[:300] for i in range(14)})
    with pytest.raises(DataError, match=mentioning("4 /004/4.JPEG")):
        [*batches(broken, Grid())]


def test_the_command(source: LabeledFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (f"{source.path(id)},{source.labels[id]}\n" for id in range(len(source)))
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(lines))
    grid.main(str(tmp_path / "list.csv"), workers=3, batch_size=2)
    *ranks, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in ranks] == [["rank", f"{rank}:", "whole"] for rank in range(3)]
    assert all(mentions(line, "right_bottom 2 3 112") for line in ranks)
    assert mentions(last, "12 14 images 0 repeated 6")
