"""Predicts and evaluates boxes in images, as COCO has them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from raydali.data.index.coco import Coco
from raydali.data.load.loader import Batch
from raydali.data.tasks.detection import PADDING, Boxes, moved
from raydali.extras import require_extra
from raydali.inference.task_results.task_results import Arrays, TaskResults
from raydali.inference.worst import worst_of
from raydali.text import printable, summarize
from raydali.training.evaluation.detection import Found, coco_metrics, in_originals

SURE, SAME = 0.5, 0.5
"""Score above which a box counts as found, and IoU from which it is the box of the annotation; for the worst images."""
_TRUE, _FOUND = (63, 185, 80), (255, 82, 82)
METRICS = "map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar_1", "mar_10", "mar_100"


class Detection(TaskResults):
    """Images with boxes; the outputs are the boxes found in each, in pixels of the original."""

    noun = "image"
    legend = f"Boxes of the annotations are green, boxes found with a score above {SURE} are red."
    endings = (".csv", ".parquet", ".json")
    source: Coco

    def outputs(self, raw: Any, batch: Batch) -> dict[str, Any]:
        """Return "counts" (n,) of boxes, and "boxes" (B, 4), "scores" (B,) and "labels" (B,) of all images."""
        images, sizes = batch["images"], batch["sizes"].cpu().numpy()
        # Label 0 is the background, of which some of torchvision's detectors find boxes too.
        results = [{name: of[name][of["labels"] > 0] for name in of} for of in raw]
        detections = in_originals(batch.ids.tolist(), sizes, results, images.shape[-1])
        _, boxes, scores, labels = zip(*detections, strict=True)
        return {
            "counts": torch.tensor([len(of_image) for of_image in scores]),
            "boxes": torch.from_numpy(np.concatenate(boxes)),
            "scores": torch.from_numpy(np.concatenate(scores)),
            "labels": torch.from_numpy(np.concatenate(labels)),
        }

    def evaluation(self, arrays: Arrays) -> dict[str, Any]:
        """Compute COCO's figures, and the mAP of each class."""
        require_extra("detection", "faster_coco_eval", "detectors")
        source, classes = self.source, self.classes
        result = coco_metrics(_found(arrays), source, of_classes=True)
        metrics = {name: float(result[name]) for name in METRICS}
        of_labels = dict(zip(result["classes"].tolist(), result["map_per_class"].tolist(), strict=True))
        boxes = np.bincount(source.labels, minlength=len(classes) + 1)
        rows = [
            {"class": name, "boxes": int(boxes[label]), "map": of_labels.get(label)}
            for label, name in enumerate(classes, 1)
        ]
        mistakes = np.array([_mistakes(source, detections) for detections in _found(arrays)])

        def words(place: int) -> tuple[str, str]:
            labels = source.labels[source.boxes_of(int(arrays["ids"][place]))].tolist()
            truth = summarize(f"{count} {classes[label - 1]}" for label, count in sorted(Counter(labels).items()))
            missed, false = mistakes[place].tolist()
            return truth or "no boxes", f"{missed} missed, {false} false"

        worst = worst_of(arrays, mistakes.sum(1), source.path, words)[: np.count_nonzero(mistakes.sum(1))]
        # COCO's figures are -1 where there is no box of that size.
        defined = {name: value for name, value in metrics.items() if value >= 0}
        return {"metrics": defined, "classes": rows, "worst": worst}

    def picture(self, id: int, arrays: Arrays) -> NDArray[np.uint8]:
        """Return the image with the boxes of its annotations and those that were found."""
        from PIL import Image, ImageDraw

        source = self.source
        pixels, size = self.pipeline.sample(source, id, 0)
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        draw, side = ImageDraw.Draw(image), image.width
        (place,) = np.flatnonzero(arrays["ids"] == id).tolist()
        of_image = slice(*np.concatenate([[0], arrays["counts"].cumsum()])[place : place + 2].tolist())
        sure = arrays["boxes"][of_image][arrays["scores"][of_image] > SURE]
        for boxes, colour in ((source.boxes[source.boxes_of(id)], _TRUE), (sure, _FOUND)):
            window = np.zeros((1, 2), np.int64), size.numpy()[None], np.zeros(1, np.int32)
            placed, labels = moved(boxes[None], np.zeros((1, len(boxes)), np.int64), *window, side)
            for box in placed[labels != PADDING]:
                draw.rectangle(box.tolist(), outline=colour, width=max(1, side // 50))
        return np.asarray(image)

    def table(self, arrays: Arrays) -> pa.Table:
        """Return a row for each box: path, image, label, score, and x, y, width, height in pixels as COCO has them."""
        names = np.array(["", *map(printable, self.classes)], object)
        owners, boxes = np.repeat(arrays["ids"], arrays["counts"]), arrays["boxes"]
        columns = {
            "path": pa.array([printable(self.source.path(id)) for id in owners.tolist()], pa.string()),
            "image": self.source.image_ids[owners],
            "label": pa.array(names[arrays["labels"]], pa.string()),
            "score": arrays["scores"],
        }
        return pa.table(columns | dict(zip(("x", "y", "width", "height"), _with_sides(boxes).T, strict=True)))


def _mistakes(source: Coco, detections: Found) -> tuple[int, int]:
    """Return how many boxes of an image are missed, and how many that were found are false.

    They are paired by falling score, as COCO does.
    """
    from faster_coco_eval.core.mask import iou

    id, boxes, scores, labels = detections
    sure = np.argsort(-scores, kind="stable")[: (scores > SURE).sum()]
    truth = source.boxes_of(id)
    crowd = source.crowd[truth]
    mine, theirs = (_with_sides(corners).astype(np.float64) for corners in (boxes[sure], source.boxes[truth]))
    overlaps = np.reshape(iou(mine, theirs, crowd), (len(mine), len(theirs)))  # in a crowd, as a share of the found box
    overlaps[labels[sure][:, None] != source.labels[truth]] = 0
    missed, false = ~crowd, 0
    for row in overlaps:
        if (row * missed).max(initial=0) >= SAME:
            missed[(row * missed).argmax()] = False
        elif (row * crowd).max(initial=0) < SAME:
            false += 1
    return int(missed.sum()), false


def _with_sides(boxes: Boxes) -> Boxes:
    """Return x, y, width and height of boxes (K, 4), which have two corners."""
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)


def _found(arrays: Arrays) -> Iterator[Found]:
    ends = arrays["counts"].cumsum()[:-1]
    of_images = (np.split(arrays[name], ends) for name in ("boxes", "scores", "labels"))
    yield from zip(arrays["ids"].tolist(), *of_images, strict=True)
