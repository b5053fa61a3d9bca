"""`raydali bench video`: how many frames per second loaders of clips deliver when nothing uses them.

    raydali bench video --data ~/kinetics/train --gpus 1,2,4 --decoders 1,7 --json video.json
    raydali bench video --codec mjpeg --height 240 --make 16 --frames 60 --loaders raydali,pyav
    raydali bench video --seed-table --gpus 1,2,4

As in `raydali bench loader`, all loaders deliver the same formats, 8 bits and normalized floats. Each rate is measured
in new processes, the repeats are interleaved, and files are read from the page cache if they fit.
"""

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from raydali.bench import common
from raydali.bench.common import (
    PIXELS,
    LoadingOptions,
    cell,
    contender_name,
    present,
    ratio,
    require_measured,
    result_of,
    show_rows,
    spread,
    task_of,
)
from raydali.bench.synthetic_videos import VideoCodec, VideoSet, synthetic_videos
from raydali.errors import UsageError
from raydali.extras import require_extra
from raydali.output import devices
from raydali.text import plural

CHOICE = ("raydali", "reader", "pyav")
ONE_PROCESS = ("pyav",)
"""Loaders that are measured on at most one GPU: their processes share the host's cores for any number of GPUs."""

PUBLISHED_VIDEOS, PUBLISHED_FRAMES = 173, 300
PUBLISHED_SECONDS = {0: 59.01, 1: 97.45, 2: 48.28, 4: 21.34}
"""Duration of one pass, by number of GPUs; 0 is PyTorch on the CPU. Batches of 8, 8 threads or workers, 1080p, DALI 1.6
and decord on a Xeon Gold 5120 with Tesla V100s: only the ratios are comparable with ours."""
SETTINGS: dict[str, Any] = {
    "make": PUBLISHED_VIDEOS,
    "frames": PUBLISHED_FRAMES,
    "batch_size": 8,
    "sequence_length": 30,
    "threads": 8,
    "workers": 8,
    "pixels": "uint8",
}
"""Options that the published table fixes."""


@dataclass(frozen=True, kw_only=True)
class VideoBench(LoadingOptions):
    """Measure how many frames per second loaders of clips deliver when nothing uses them, as a table with ratios."""

    data: str | None = None
    """Folder of class folders of videos. Default: synthetic videos."""
    make: int = 64
    """Without --data: number of synthetic videos, in a temporary folder."""
    codec: VideoCodec = "h264"
    """Codec of synthetic videos."""
    frames: int = 300
    """Frames of each synthetic video; every 30th is a keyframe."""
    height: int = 1080
    """Height of synthetic videos, in pixels; their width is 16/9 of it."""
    decoders: str | None = None
    """Numbers of clips that raydali decodes at once per GPU, such as 1,7,14. Default: three per two video engines."""
    batch_size: int = 8
    """Clips per batch and GPU."""
    sequence_length: int = 16
    """Frames per clip."""
    stride: int = 1
    """Distance from one frame of a clip to the next."""
    threads: int = 16
    """DALI threads per GPU."""
    loaders: str = ",".join(CHOICE)
    """Loaders to measure. The reader is left out if there is no GPU."""
    seed_table: bool = False
    """Reproduce a published table instead: 173 videos of 300 frames, batches of 8, 8 threads or workers."""


def main(options: VideoBench) -> dict[str, Any]:
    """Measure the loaders, show the table and write the file.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows"}. A row: {"loader", "pixels" ("uint8" or
        "float32"), "gpus" (0: the CPU), "decoders" (null: the default), "frames_per_second" (over all GPUs, the
        median), "low", "high", "seconds" (measured, all repeats), "repeats" (each one's rate), "to_reader" (one
        pipeline on as many GPUs), "to_cpu" (pyav, which delivers the same), "scaling" (to
        itself on the fewest GPUs), "error"}; with --seed-table also "pass_seconds" and "published_seconds". Null: not
        measured.

    Raises:
        UsageError: an option is invalid; before anything is measured.
        CommandError: a loader could not be measured; after the other results were shown and written.
    """
    from raydali.data.sources.video.clips import VideoClips

    require_extra("video", "av", "videos")
    if options.seed_table:
        options = replace(options, **SETTINGS)
    common.check(options, loaders=CHOICE, pixels=PIXELS)
    counts = common.gpu_counts(options.gpus)
    rows = _rows(options, counts, _decoders(options.decoders))
    videos = VideoSet(options.codec, options.make, options.frames, options.height)
    with synthetic_videos(options.data, videos) as root:
        clips = VideoClips.scan(root, sequence_length=options.sequence_length, stride=options.stride)
        common.check_samples(options, len(clips), max(counts), devices(max(counts)), unit="clips")
        _measure(options, root, rows)
        settings = asdict(options) | {"videos": len(clips.videos), "clips": len(clips)}
    result = result_of("bench video", settings, rows)
    present(result, options, _show_table)
    require_measured(rows, _name)
    return result


def _decoders(listed: str | None) -> list[int | None]:
    if listed is None:
        return [None]
    counts = common.integers(listed)
    if not counts or counts[0] < 1:
        raise UsageError(f"--decoders must be numbers of decoders such as 1,4,7, not {listed!r}: at least 1 each")
    return [*counts]


def _rows(options: VideoBench, counts: list[int], decoders: list[int | None]) -> list[dict[str, Any]]:
    rows = []
    for name in common.names(options.loaders):
        for gpus in [min(1, counts[-1])] if name in ONE_PROCESS else counts:
            if name == "reader" and gpus == 0:
                continue
            for count, pixels in product(decoders if name == "raydali" else [None], common.names(options.pixels)):
                rows.append({"loader": name, "pixels": pixels, "gpus": gpus, "decoders": count, "error": None})
    if not rows:
        raise UsageError(f"--loaders {options.loaders} needs a GPU, and --gpus names none: add raydali or pyav")
    return rows


def _measure(options: VideoBench, root: str, rows: list[dict[str, Any]]) -> None:
    from raydali.bench.clip_loaders import VideoTask
    from raydali.bench.loader_rates import interleaved

    def task(row: dict[str, Any]) -> VideoTask:
        given = {name: row[name] for name in ("loader", "pixels", "decoders")}
        return task_of(VideoTask, options, root=root, **given)

    interleaved(rows, task, repeats=options.repeats, name=_name, unit="frames", units_each=options.sequence_length)
    for row in rows:
        rate, on_loader = row["frames_per_second"], {"loader": row["loader"], "decoders": row["decoders"]}
        own, reader = _rates(rows, row, **on_loader), _rates(rows, row, loader="reader", gpus=row["gpus"])
        on_cpu = [each for name in ONE_PROCESS for each in _rates(rows, row, loader=name)]
        row["to_reader"] = ratio(rate, next(iter(reader), None))
        row["to_cpu"] = ratio(rate, max(on_cpu, default=None))
        row["scaling"] = ratio(rate, next(iter(own), None)) if row["gpus"] else None
        if options.seed_table:
            row["pass_seconds"] = PUBLISHED_VIDEOS * PUBLISHED_FRAMES / rate if rate else None
            row["published_seconds"] = PUBLISHED_SECONDS.get(0 if row["loader"] in ONE_PROCESS else row["gpus"])


def _rates(rows: list[dict[str, Any]], like: dict[str, Any], **wanted: Any) -> list[float]:
    """List the rates of rows with these values that deliver the same format as `like`."""
    wanted["pixels"] = like["pixels"]
    fitting = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    return [row["frames_per_second"] for row in fitting if row["frames_per_second"]]


def _name(row: dict[str, Any]) -> str:
    return f"{_loader(row)} on {devices(row['gpus'])}"


def _loader(row: dict[str, Any]) -> str:
    count = row["decoders"]
    return f"{contender_name(row)}, {plural(count, 'decoder')}" if count else contender_name(row)


def _show_table(result: dict[str, Any]) -> None:
    chosen = result["settings"]
    columns = {
        "loader": _loader,
        "on": lambda row: devices(row["gpus"]),
        "frames/s": cell("frames_per_second"),
        "lowest .. highest": spread,
        "/ reader": cell("to_reader", ".2f"),
        "/ CPU": cell("to_cpu", ".2f"),
        "scaling": cell("scaling", ".2f"),
    }
    if chosen["seed_table"]:
        columns |= {"seconds a pass": cell("pass_seconds", ",.2f"), "published": cell("published_seconds", ",.2f")}
    show_rows(
        f"{chosen['clips']:,} clips of {chosen['sequence_length']} frames in {chosen['videos']:,} videos, to "
        f"{chosen['image_size']} x {chosen['image_size']} pixels, batches of {chosen['batch_size']}, "
        f"{chosen['threads']} threads, {chosen['workers']} DataLoader workers; in 8 bits unless noted",
        columns,
        result["rows"],
    )
