"""Images with boxes, as COCO has them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from raydali.data.loading.loader import Batch
from raydali.data.sources import storage
from raydali.data.sources.builtin.shapes import shapes_folder
from raydali.data.sources.coco import Coco
from raydali.data.sources.coco_folder import one_split, train_and_val
from raydali.data.sources.exclusion import exclude
from raydali.data.sources.files import absolute
from raydali.data.sources.image_folder import EXTENSIONS
from raydali.data.sources.unlabeled import unlabeled_files
from raydali.errors import UsageError
from raydali.extras import require_extra
from raydali.inference.kinds.kind import Arrays, Evaluation, Kind, text_of
from raydali.text import summarize
from raydali.train.evaluation.detection import Found, coco_metrics, in_originals

METRICS = "map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar_1", "mar_10", "mar_100"


class Detection(Kind):
    """Images with boxes; the outputs are the boxes found in each, in pixels of the original."""

    endings = (".csv", ".parquet", ".json")

    def open_validation(self, config: Any) -> tuple[Coco, Coco]:
        """See `Kind`."""
        data = config.data or shapes_folder()
        indexes = train_and_val(data, config.annotations, config.val_data, config.val_annotations)
        train, val = exclude(config.exclude, *indexes)
        return train, val

    def open_labeled(self, data: str, config: Any, classes: Sequence[str] | None) -> Coco:
        """See `Kind`; a folder laid out like COCO, of which val is taken."""
        if not storage.is_folder(absolute(f"{data.rstrip('/')}/annotations")):
            raise UsageError(f"--data {data} has no annotations/: give a folder laid out like COCO")
        (source,) = exclude(None, one_split(absolute(data), "val"))
        if classes is not None and (unknown := [name for name in source.classes if name not in classes]):
            raise UsageError(f"{data} has classes that the run lacks ({summarize(unknown, show=repr)}): remove them")
        return source

    def open_unlabeled(self, data: str, root: str | None, config: Any, classes: Sequence[str]) -> Coco:
        """See `Kind`."""
        images = unlabeled_files(data, root, EXTENSIONS)
        count = len(images)
        return Coco(
            root=images.root,
            packed_paths=images.packed_paths,
            offsets=images.offsets,
            sizes=np.zeros((count, 2), np.int64),
            image_ids=np.arange(count),
            first_boxes=np.zeros(count + 1, np.int64),
            boxes=np.zeros((0, 4), np.float32),
            labels=np.zeros(0, np.int64),
            crowd=np.zeros(0, np.bool_),
            classes=tuple(classes),
            category_ids=np.arange(1, len(classes) + 1),
        )

    def network(self, model: nn.Module, config: Any) -> nn.Module:
        """Return the model, which normalises images itself."""
        return model.to(memory_format=torch.channels_last)

    def outputs(self, network: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Return "counts" (n,) of boxes, and "boxes" (B, 4), "scores" (B,) and "labels" (B,) of all images."""
        images, sizes = batch["images"], batch["sizes"].cpu().numpy()
        found = in_originals(batch.ids.tolist(), sizes, network(images), images.shape[-1])
        _, boxes, scores, labels = zip(*found, strict=True)
        return {
            "counts": torch.tensor([len(each) for each in scores]),
            "boxes": torch.from_numpy(np.concatenate(boxes)),
            "scores": torch.from_numpy(np.concatenate(scores)),
            "labels": torch.from_numpy(np.concatenate(labels)),
        }

    def evaluation(self, arrays: Arrays, source: Coco, classes: Sequence[str]) -> Evaluation:
        """Compute COCO's figures, and the mAP of each class."""
        require_extra("detection", "pycocotools", "detectors")
        result = coco_metrics(_found(arrays), source, of_classes=True)
        metrics = {name: float(result[name]) for name in METRICS}
        labels = np.atleast_1d(result["classes"].numpy()).tolist()
        of_labels = dict(zip(labels, np.atleast_1d(result["map_per_class"].numpy()).tolist(), strict=True))
        boxes = np.bincount(source.labels, minlength=len(classes) + 1)
        rows = [
            {"class": name, "boxes": int(boxes[label]), "map": of_labels.get(label)}
            for label, name in enumerate(classes, 1)
        ]
        # COCO's figures are -1 where there is no box of that size.
        return Evaluation(metrics={name: value for name, value in metrics.items() if value >= 0}, classes=rows)

    def table(self, arrays: Arrays, source: Coco, classes: Sequence[str]) -> pa.Table:
        """Return a row for each box: path, image, label, score, and x, y, width, height in pixels as COCO has them."""
        names = np.array(["", *classes], object)
        owners, boxes = np.repeat(arrays["ids"], arrays["counts"]), arrays["boxes"]
        columns = {
            "path": pa.array([text_of(source.path(id)) for id in owners.tolist()], pa.string()),
            "image": source.image_ids[owners],
            "label": pa.array(names[arrays["labels"]], pa.string()),
            "score": arrays["scores"],
        }
        sides = boxes[:, 2:] - boxes[:, :2]
        corners = dict(zip(("x", "y", "width", "height"), [*boxes[:, :2].T, *sides.T], strict=True))
        return pa.table(columns | corners)


def _found(arrays: Arrays) -> Iterator[Found]:
    ends = arrays["counts"].cumsum()[:-1]
    of_images = (np.split(arrays[name], ends) for name in ("boxes", "scores", "labels"))
    yield from zip(arrays["ids"].tolist(), *of_images, strict=True)
