"""Videos with one class each: the probabilities of their clips are averaged."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch.nn import functional as F

from raydali.data.loading.loader import Batch
from raydali.data.sources.formats import unlabeled_files
from raydali.data.sources.labeled import LabeledSource
from raydali.data.sources.video.clips import EXTENSIONS, VideoClips, scan_videos
from raydali.data.tasks.pipeline import Pipeline
from raydali.inference.kinds.classification import BEST, best_columns, evaluate_classes
from raydali.inference.kinds.kind import Arrays, Columns, Evaluation, Kind, text_of
from raydali.inference.labeled_data import labeled_like, unlabeled_like


class Video(Kind):
    """Videos with one class each; the outputs are the probabilities of all classes for each clip."""

    noun: ClassVar[str] = "clip"
    legend = f"The middle frames of the first clips. {Kind.legend}"

    def open_labeled(self, data: str, config: Any, classes: Sequence[str] | None, given: Columns) -> VideoClips:
        """See `Kind`."""
        return _clips(labeled_like(data, config, classes, given, scan_videos), config)

    def open_unlabeled(self, data: str, root: str | None, config: Any, classes: Sequence[str]) -> VideoClips:
        """See `Kind`."""
        return _clips(unlabeled_like(unlabeled_files(data, root, EXTENSIONS), classes), config)

    def edges(self, source: VideoClips) -> NDArray[np.int64]:
        """Return the first clip of each video: the clips of a video are in one part."""
        first_clips: NDArray[np.int64] = np.unique(source.places(np.arange(len(source)))[0], return_index=True)[1]
        return first_clips

    def outputs(self, raw: Any, batch: Batch, source: Any) -> dict[str, Any]:
        """Return "all" (n, C), the probabilities, and "losses" (n,)."""
        logits = raw.float()
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        return {"all": logits.softmax(1), "losses": losses}

    def evaluation(self, arrays: Arrays, source: VideoClips, classes: Sequence[str]) -> Evaluation:
        """Compute the figures of `evaluate_classes` for videos, and "video_top1" and the like."""
        videos, of_videos = _by_video(arrays, source)
        labels = source.videos.labels[videos]
        found = evaluate_classes(of_videos, labels, classes, source.videos.path, "videos")
        right = of_videos["best"] == labels[:, None]
        figures = {"top1": right[:, 0].mean(), "loss": of_videos["losses"].mean()}
        if len(classes) > BEST:
            figures["top5"] = right.any(1).mean()
        metrics = {f"video_{name}": float(value) for name, value in figures.items()} | dict(found.metrics)
        return Evaluation(metrics=metrics, classes=found.classes, confusion=found.confusion, worst=found.worst)

    def picture(self, pipeline: Pipeline[Any], source: VideoClips, id: int, arrays: Arrays) -> NDArray[np.uint8]:
        """Return the middle frame of a video's first clip."""
        clip = pipeline.sample(source, int(self.edges(source)[id]), 0)[0]
        frame: NDArray[np.uint8] = clip[:, clip.shape[1] // 2].permute(1, 2, 0).numpy()
        return frame

    def table(self, arrays: Arrays, source: VideoClips, classes: Sequence[str]) -> pa.Table:
        """Return a row for each video: path, clips, label, probability, and the next four."""
        videos, of_videos = _by_video(arrays, source)
        counts = np.unique(source.places(arrays["ids"])[0], return_counts=True)[1]
        paths = [text_of(source.videos.path(video)) for video in videos.tolist()]
        return pa.table({"path": paths, "clips": counts} | best_columns(of_videos, classes))


def _clips(videos: LabeledSource, config: Any) -> VideoClips:
    return VideoClips.index(
        videos,  # type: ignore[arg-type]  # folders and lists of files
        sequence_length=config.sequence_length,
        stride=config.stride,
        step=config.step,
        skip_broken=config.skip_broken,
    )


def _by_video(arrays: Arrays, source: VideoClips) -> tuple[NDArray[np.int64], Arrays]:
    """Return the videos, and the arrays of `evaluate_classes` with a row for each, of averaged probabilities."""
    videos, places = np.unique(source.places(arrays["ids"])[0], return_inverse=True)
    counts = np.bincount(places)
    mean = np.zeros((len(videos), arrays["all"].shape[1]))
    np.add.at(mean, places, arrays["all"])
    mean /= counts[:, None]
    best = np.argsort(-mean, axis=1, kind="stable")[:, :BEST]
    truth = mean[np.arange(len(videos)), source.videos.labels[videos]]
    losses = -np.log(np.maximum(truth, np.finfo(np.float32).tiny))
    return videos, {
        "ids": videos,
        "best": best,
        "probabilities": np.take_along_axis(mean, best, 1).astype(np.float32),
        "losses": losses,
    }
