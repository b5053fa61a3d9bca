"""This file pins values that a later version has to reproduce: ids of streams, substitutes, pixels, public names."""

import inspect
import json
from collections.abc import Callable
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import raydali
from raydali.data.augment.augmentation import Augmentation
from raydali.data.broken.quarantine import Quarantine, substitute
from raydali.data.index.coco import Coco
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.labeled import LabeledFiles
from raydali.data.index.masked_images import train_and_val
from raydali.data.load.loader import LoaderOptions
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.counter_rng import keyed, uniforms
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks import classification, detection, restoration, segmentation
from raydali.data.video import task as video
from raydali.data.video.clips import VideoClips
from raydali.measure.verdict import CAUSES
from tests.support import broken
from tests.support.videos import moving, write_video

DECODING: tuple[LoaderName, ...] = ("dali", "torch")
SAMPLES = 6


def digest(*arrays: NDArray[Any]) -> str:
    """The beginning of the SHA-256 of the values of arrays, in order."""
    return sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()[:16]


# ----------------------------------------------------------------------------------------------------------------------
# The stream


BILLION = 10**9
SMALL = {"samples": 203, "epochs": 3, "batch_size": 4, "global_batch_size": 12, "seed": 3}
BLOCKS = {"shuffle_block": 5, "shuffle_window": 2}
PLAIN = [86, 25, 72, 131, 202, 67, 177, 59, 0, 198, 126, 70]
APART = [129, 126, 125, 128, 65, 67, 184, 183, 80, 120, 121, 83]
STREAMS: list[tuple[dict[str, Any], list[int], str]] = [
    (SMALL | {"samples": 10, "batch_size": 2, "global_batch_size": 4}, [9, 0, 2, 3], "c07660c7f7a591c3"),
    (SMALL, PLAIN, "464d05ad8b49a5e0"),
    (SMALL | {"seed": 2**63 - 1}, [154, 63, 17, 84, 57, 185, 171, 115, 41, 144, 4, 99], "34407bcb576b60df"),
    (
        SMALL | {"samples": 1_281_167, "epochs": 90, "batch_size": 2, "global_batch_size": 4, "seed": 7},
        [793034, 1227109, 1021973, 932236],
        "ce9aa65c6efdb75e",
    ),
    (
        SMALL | {"samples": BILLION, "batch_size": 2, "global_batch_size": 4, "seed": 1},
        [139970054, 541342789, 888433541, 764145664],
        "894e4450f930cef2",
    ),
    (SMALL | {"repeats": 3}, PLAIN, "68d3fe3f6d46c940"),
    (SMALL | {"shuffle_block": 5}, [162, 131, 72, 70, 86, 83, 199, 81, 85, 202, 152, 33], "e17f8193a13766b6"),
    (SMALL | BLOCKS, [129, 126, 125, 128, 18, 16, 17, 127, 19, 15, 201, 110], "89770900dc1c745c"),
    (SMALL | BLOCKS | {"shuffle_apart": True}, APART, "26155c3a8b41d6f0"),
    (SMALL | BLOCKS | {"shuffle_apart": True, "batch_size": 2, "order_batch_size": 4}, APART, "71c90e22b555f983"),
]
"""Settings of a stream, the ids of its first global batch, and the digest of three global batches."""


@pytest.mark.parametrize(("settings", "first", "of_three_steps"), STREAMS)
def test_the_ids_of_a_stream(settings: dict[str, Any], first: list[int], of_three_steps: str) -> None:
    """At the first step, in the middle and at the last step: ids, epochs and keys of what is drawn."""
    stream = Stream(**settings)
    micro_batches = stream.micro_batches_per_step
    steps = [
        [*islice(stream.micro_batches(0, 1, start=step), micro_batches)]
        for step in (0, stream.steps // 2, stream.steps - 1)
    ]
    assert [id for batch in steps[0] for id in batch.ids.tolist()] == first
    arrays = [array for step in steps for batch in step for array in (batch.ids, batch.epochs, batch.draw_keys)]
    assert digest(*arrays) == of_three_steps


def test_the_numbers_of_a_key() -> None:
    assert keyed(1, 2, 3) == 15020427595393229491
    first, second = [0.9435207316877064, 0.8600403078450347], [0.7281566990780163, 0.7884802142688574]
    assert uniforms(2, 5, 1, [3, 4]).tolist() == [first, second]


# ----------------------------------------------------------------------------------------------------------------------
# Substitutes of broken samples


def test_the_substitute_of_a_sample() -> None:
    assert [substitute(0, 0, 6, attempt, 16) for attempt in range(6)] == [6, 14, 6, 0, 12, 12]
    of_many = [substitute(2**63 - 1, 89, BILLION - 1, attempt, BILLION) for attempt in range(3)]
    assert of_many == [126221113, 33190103, 140761480]


@pytest.mark.parametrize("name", DECODING)
def test_the_substitutes_that_a_loader_reads(name: LoaderName, tmp_path: Path) -> None:
    stream, quarantine = Stream(samples=8, epochs=3, batch_size=4, global_batch_size=8, seed=5), Quarantine(8, seed=5)
    source = broken.folder(tmp_path, 8, {1: "text", 4: "cut-short", 6: "vanished"})
    replaced: dict[tuple[int, int], int] = {}
    pipeline = classification.TrainImages(image_size=16, seed=5)
    with make_loader(name, source, pipeline, stream, quarantine=lambda _: quarantine) as loader:
        for batch in loader:
            one = batch.micro_batch
            if one.replaced_by is not None:
                rows = zip(one.epochs.tolist(), one.ids.tolist(), one.replaced_by.tolist(), strict=True)
                replaced |= {(epoch, id): other for epoch, id, other in rows if other >= 0}
    assert replaced == {
        **{(0, 1): 3, (0, 4): 5, (0, 6): 7},
        **{(1, 1): 2, (1, 4): 2, (1, 6): 2},
        **{(2, 1): 5, (2, 4): 3, (2, 6): 7},
    }


# ----------------------------------------------------------------------------------------------------------------------
# Pixels on the CPU, 8 bits


def picture(id: int) -> NDArray[np.uint8]:
    """Return stripes and slopes (height, width, 3), of another size for each id."""
    y, x = np.mgrid[: 40 + 5 * id, : 72 - 4 * id]
    return np.stack([3 * y + 40 * (x // 8 % 3), 2 * x + 9 * id, 5 * (x + y)], 2).astype(np.uint8)


def written(path: Path, pixels: NDArray[np.uint8]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def labeled(root: Path) -> LabeledFiles:
    for id in range(SAMPLES):
        written(root / "ab"[id % 2] / f"{id}.png", picture(id))
    return LabeledFiles.scan(str(root))


def pairs(root: Path) -> ImagePairs:
    for id in range(SAMPLES):
        written(root / f"img/{id}.png", picture(id))
        written(root / f"gt/{id}.png", 255 - picture(id))
    return ImagePairs.scan(str(root))


def masked(root: Path) -> Any:
    for split in ("train", "val"):
        for id in range(SAMPLES):
            written(root / split / f"images/{id}.png", picture(id))
            written(root / split / f"masks/{id}.png", picture(id)[..., 0] // 52)
    return train_and_val(str(root), classes="5")[0]


def boxes(root: Path) -> Coco:
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    for id in range(SAMPLES):
        height, width, _ = picture(id).shape
        written(root / f"images/{id}.png", picture(id))
        images.append({"id": id, "file_name": f"{id}.png", "height": height, "width": width})
        for box in ([4, 5 + id, 20, 25], [15 + id, 2, 18, 12])[: id % 3]:
            annotations.append({"id": len(annotations), "image_id": id, "bbox": box, "category_id": 1, "iscrowd": 0})
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "box"}]}
    (root / "boxes.json").write_text(json.dumps(content))
    return Coco.from_file(str(root / "boxes.json"), str(root / "images"))


def clips(root: Path) -> VideoClips:
    for video_number in range(2):
        write_video(root / f"a/{video_number}.mkv", moving(12, start=17 * video_number), "ffv1")
    return VideoClips.scan(str(root), sequence_length=4)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "classification": labeled,
    "detection": boxes,
    "restoration": pairs,
    "segmentation": masked,
    "video": clips,
}
PIPELINES: dict[str, Any] = {
    "classification, train": classification.TrainImages(image_size=24, seed=3),
    "classification, bicubic": classification.TrainImages(image_size=24, seed=3, interpolation="bicubic"),
    "classification, val": classification.ValidationImages(image_size=24, resize_size=28),
    "detection, train": detection.TrainImages(image_size=48, seed=3, max_boxes=2),
    "detection, val": detection.ValidationImages(image_size=48),
    "restoration, train": restoration.TrainPairs(crop_size=(24, 32), seed=3),
    "restoration, val": restoration.ValidationPairs(crop_size=(24, 32)),
    "segmentation, train": segmentation.TrainImages(canvas=(40, 48), base_size=48, seed=3, jitter=0.3),
    "segmentation, val": segmentation.ValidationImages(canvas=(72, 72)),
    "video, train": video.TrainClips(image_size=24, resize_size=32, seed=3),
    "video, val": video.ValidationClips(image_size=24, resize_size=32),
}
PIXELS = {
    "classification, train": {"dali": "b403860571a4fc18", "torch": "2f29cf0c4a1074d5"},
    "classification, bicubic": {"dali": "caccb447ca3c0005", "torch": "370f643894c36e0d"},
    "classification, val": {"dali": "74c61b1072d2b262", "torch": "cbac91a4cbdfd07e"},
    "detection, train": {"dali": "93d77ece7df9a5b5", "torch": "0ad3b3d9590fc7eb"},
    "detection, val": {"dali": "cbf2add804315d1d", "torch": "ebe1be2e7d1d0865"},
    "restoration, train": {"dali": "1cf5499c0dfb1c84", "torch": "1cf5499c0dfb1c84"},
    "restoration, val": {"dali": "05320f3bbf789d01", "torch": "05320f3bbf789d01"},
    "segmentation, train": {"dali": "3aaccf76dd2b7a4c", "torch": "a207c98ea9eacdfa"},
    "segmentation, val": {"dali": "9f5f583e3e127c40", "torch": "9f5f583e3e127c40"},
    "video, train": {"dali": "feb373f7fcf92ae3", "torch": "feb373f7fcf92ae3"},
    "video, val": {"dali": "94703b277a791044", "torch": "94703b277a791044"},
}
"""By pipeline and loader, the digest of all that the loader delivers."""


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    sources: dict[str, Any] = {}

    def source(task: str) -> Any:
        if task not in sources:
            sources[task] = SOURCES[task](tmp_path_factory.mktemp(task))
        return sources[task]

    return source


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_pixels_that_a_loader_delivers(pipeline: str, name: LoaderName, source_of: Callable[[str], Any]) -> None:
    """They are of lossless files, so that no decoder rounds; labels, boxes and masks belong to them.

    The values are of the locked versions of DALI, torchvision and PyAV, on x86-64 with AVX2 or AVX-512.
    """
    source = source_of(pipeline.partition(",")[0])
    order: Stream | OrderedPass = OrderedPass(samples=SAMPLES, batch_size=4)
    if not pipeline.endswith("val"):
        order = Stream(samples=SAMPLES, epochs=2, batch_size=3, global_batch_size=6, seed=1)
    arrays = []
    with make_loader(name, source, PIPELINES[pipeline], order, threads=1) as loader:
        for batch in loader:
            arrays += [tensor.numpy().copy() for tensor in batch.tensors.values()]
    assert arrays[0].dtype == np.uint8
    assert digest(*arrays) == PIXELS[pipeline][name]


@pytest.mark.parametrize(
    ("policy", "plans"),
    [("trivial", "ef6e6b83401e9248"), ("rand-m7-mstd0.5-inc1", "dffdd19928047c32"), ("augmix", "d052caa45ed29c44")],
)
def test_what_an_augmentation_draws(policy: str, plans: str) -> None:
    """Its pixels depend on the vector units of the CPU: sums of floats are rounded otherwise without AVX2."""
    images = classification.TrainImages(image_size=24, seed=3, augmentation=Augmentation(policy, erase=0.5))
    (drawn,) = images.plans(np.arange(64), np.arange(64) % 3)
    assert digest(np.asarray(drawn)) == plans


# ----------------------------------------------------------------------------------------------------------------------
# Names


PUBLIC = """
AugmentationOptions Bounds ClassifierOptions Coco DataError DetectorNetwork Examples Files FineTuningOptions IGNORED
ImageOptions ImagePairs Inputs Job KINETICS KINETICS_MEAN KINETICS_STD LabeledDataOptions LabeledFiles LabeledSource
Loader MaskedImages MovingAverage MultiLabelOptions Normalized OrderedPass PEAKS Pipeline Quarantine RecipeOptions
RegularizationOptions RestorationNetwork Run Samples ScheduleOptions Session SplitOptions StartingWeightsOptions
StorageAway Stream TrainAndVal TrainBoxes TrainClips TrainImages TrainMasks TrainPairs TrainingRun UsageError
ValidationBoxes ValidationClips ValidationImages ValidationMasks ValidationPairs ValidationPass VideoClips
WeightsOptions WithAuxiliary absolute balanced_pixel_weights blurred_folder build_classifier build_detector
build_optimizer build_segmenter build_video_model charbonnier check_clips check_detector check_segmenter check_sizes
check_video_model classification_loss constant_parts detection_loss digits_folder evaluate_classifier evaluate_detector
evaluate_labels evaluate_restoration evaluate_segmenter evaluating exclude has_one_size labeled_images learning_rate
make_loader make_video_loader mask_files masked_shapes_folder measured mixing moving_discs_folder open_coco open_labeled
open_masked open_pairs open_run plural read_lines reading require require_data require_extra require_read restore
restored_files run_job run_main scan_videos segmentation_loss set_learning_rate shapes_folder timed train uniforms
"""


def test_the_public_names() -> None:
    assert vars(raydali)["__all__"] == PUBLIC.split()


ARGUMENTS = {
    "Normalized": "model mean std",
    "OrderedPass": "samples batch_size",
    "Stream": "samples epochs batch_size global_batch_size seed shuffle_block shuffle_window shuffle_apart repeats",
    "TrainImages": "image_size seed random_area random_aspect flip_probability interpolation augmentation image_sizes",
    "ValidationImages": "image_size resize_size interpolation",
    "labeled_images": "data root classes label_column image_column multi_label",
    "make_loader": "name source pipeline order",
    "measured": "loader",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_arguments_of_a_public_name(name: str) -> None:
    """A later version may take more."""
    taken = inspect.signature(getattr(raydali, name)).parameters
    assert {*ARGUMENTS[name].split()} <= taken.keys()


def test_the_options_of_a_loader() -> None:
    assert {"rank", "world_size", "start", "device", "threads", "quarantine"} <= LoaderOptions.__annotations__.keys()


def test_the_causes_that_a_verdict_names() -> None:
    of_loaders = "storage", "python", "cpu decode", "gpu decode", "loader"
    of_ranks = "straggler", "communication", "contention", "gpu contention", "slower steps"
    of_time = "start-up", "compile", "validation", "checkpoint", "short epochs"
    assert {*CAUSES} == {*of_loaders, *of_ranks, *of_time, "launch-bound", "step-bound"}
