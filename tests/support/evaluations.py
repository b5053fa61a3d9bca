"""Made-up evaluations, as `raydali evaluate` writes them."""

from typing import Any


def found(classes: int) -> dict[str, Any]:
    """The content of an evaluation.json: of each class 20 samples, of later ones fewer are right."""
    names = [f"class {label}" for label in range(classes)]
    right = [20 * (classes - label) // classes for label in range(classes)]
    rows = [
        {"class": name, "images": 20, "recall": (classes - label) / classes, "precision": 0.5, "f1": None}
        for label, name in enumerate(names)
    ]
    return {
        "run": "/runs/pets",
        "weights": "best/model.safetensors of epoch 7",
        "time": 1_790_000_000.0,
        "data": None,
        "samples": 20 * classes,
        "samples_per_second": 100.0,
        "metrics": {"top1": 0.75, "top5": 1.0, "loss": 0.5, "confidence": 0.875, "calibration_error": 0.125},
        "classes": rows,
        "worst": [{"id": 3, "path": "/data/3.jpg", "truth": "class 2", "predicted": "class 1 0.97", "loss": 3.5}],
        "broken": [
            {"id": 4, "path": "/data/a.jpg", "reason": "empty"},
            {"id": 9, "path": "/data/b.jpg", "reason": "cut off"},
        ],
        "confusions": [
            {"class": "class 2", "predicted": "class 1", "samples": 9},
            {"class": "class 0", "predicted": "class 2", "samples": 1},
        ],
        "confusion": [
            [right[row] if row == column else 20 - right[row] if column == (row - 1) % classes else 0
             for column in range(classes)] for row in range(classes)
        ],
    }  # fmt: skip
