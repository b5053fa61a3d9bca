"""Restored images, compared with their targets."""

import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from raydali.data.loading.loader import Batch
from raydali.data.sources.files import Files
from raydali.data.sources.formats import unlabeled_files
from raydali.data.sources.image_pairs import ImagePairs
from raydali.data.sources.labeled import IMAGE_EXTENSIONS
from raydali.data.tasks.pipeline import Pipeline
from raydali.data.tasks.restoration import ValidationPairs, WholeImages
from raydali.data.tasks.settings import DecoderSettings
from raydali.inference.kinds.kind import WORST_SHOWN, Arrays, Columns, Evaluation, Kind, Worst, text_of
from raydali.train.evaluation.restoration import in_8_bits, per_image

_log = logging.getLogger(__name__)
_PSNR = {"input": "input_psnr", "output": "psnr"}


class Restoration(Kind):
    """Restored images; the outputs are their figures against the targets."""

    noun = "pair"
    legend = "The inputs. Below each: its PSNR, that of the model's output, and the loss."

    def open_labeled(self, data: str, config: Any, classes: Sequence[str] | None, given: Columns) -> ImagePairs:
        """See `Kind`."""
        return ImagePairs.scan(data, config.inputs, config.targets)

    def open_unlabeled(self, data: str, root: str | None, config: Any, classes: Sequence[str]) -> Files:
        """See `Kind`."""
        return unlabeled_files(data, root, IMAGE_EXTENSIONS)

    def for_prediction(self, pipeline: Pipeline[Any]) -> tuple[Kind, Pipeline[Any], int | None]:
        """Restore whole images, one at a time, since their sizes differ."""
        if type(pipeline) is not ValidationPairs:
            name = type(pipeline).__name__
            _log.warning("whole images are decoded as ValidationPairs does, and not by %s of the job", name)
        assert isinstance(pipeline, DecoderSettings)
        whole = WholeImages(hw_decoder_load=pipeline.hw_decoder_load, largest_image=pipeline.largest_image)
        return RestoredImages(), whole, 1

    def outputs(self, raw: Any, batch: Batch, source: Any) -> dict[str, Any]:
        """Return "psnr", "ssim", "input_psnr" and "losses", each (n,)."""
        return per_image(raw, batch["inputs"], batch["targets"])

    def evaluation(self, arrays: Arrays, source: ImagePairs, classes: Sequence[str]) -> Evaluation:
        """Find the worst images."""
        worst = []
        for place in np.argsort(arrays["psnr"], kind="stable")[:WORST_SHOWN].tolist():
            id = int(arrays["ids"][place])
            before, after = (f"{name} {arrays[key][place]:.1f} dB" for name, key in _PSNR.items())
            worst.append(Worst(id, source.inputs.path(id), before, after, float(arrays["losses"][place])))
        return Evaluation(worst=worst)

    def table(self, arrays: Arrays, source: Any, classes: Sequence[str]) -> pa.Table:
        """Return no rows: `RestoredImages` predicts."""
        return pa.table({})


class RestoredImages(Restoration):
    """Restored images without targets; the outputs are PNG files."""

    noun = "image"
    endings = ("",)

    def outputs(self, raw: Any, batch: Batch, source: Any) -> dict[str, Any]:
        """Return "sizes" (n,) of PNG files in bytes, and "files", uint8, all of them."""
        images = in_8_bits(raw).permute(0, 2, 3, 1).cpu().numpy()
        files = [_png(image) for image in images]
        joined = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
        return {"sizes": torch.tensor([len(file) for file in files]), "files": joined}

    def table(self, arrays: Arrays, source: Files, classes: Sequence[str]) -> pa.Table:
        """Return a row for each image: its path, and the restored file in the output's folder."""
        ids = arrays["ids"].tolist()
        return pa.table({"path": [text_of(source.path(id)) for id in ids], "file": [_name(source, id) for id in ids]})

    def files(self, arrays: Arrays, source: Files) -> Iterator[tuple[str, bytes]]:
        """See `Kind`."""
        ends = arrays["sizes"].cumsum()
        for id, content in zip(arrays["ids"].tolist(), np.split(arrays["files"], ends[:-1]), strict=True):
            yield _name(source, id), content.tobytes()


def _png(pixels: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def _name(source: Files, id: int) -> str:
    """The path of a restored image: that of its input, as PNG."""
    path = source.path(id).removeprefix(f"{source.root}/") if source.root else PurePosixPath(source.path(id)).name
    return str(PurePosixPath(path).with_suffix(".png"))
