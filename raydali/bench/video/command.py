"""`raydali bench video`: how many frames a second loaders of clips deliver when nobody uses them.

    raydali bench video --data ~/kinetics/train --gpus 1,2,4 --decoders 1,7 --json video.json
    raydali bench video --codec mjpeg --height 240 --make 16 --frames 60 --loaders raydali,pyav
    raydali bench video --seed-table --gpus 1,2,4

As in `raydali bench loader` all loaders deliver the same, in 8 bits and again as normalised floats; every figure comes
from processes of its own; the repeats go round all in turn; and files come out of the page cache, where they fit.
"""

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from raydali.bench.common import shared_options
from raydali.bench.common.results import NOT_INSTALLED, contender, require_measured, spread
from raydali.bench.common.synthetic_videos import Made, VideoCodec, made_videos
from raydali.bench.loader.command import PIXELS
from raydali.errors import UsageError
from raydali.extras import require_extra
from raydali.output import JsonFile, devices, machine, show, write_json
from raydali.text import number, plural

CHOICE = ("raydali", "reader", "pyav", "torchcodec")
ONE_PROCESS = ("pyav", "torchcodec")
"""Measured on at most one GPU: their processes share the host's cores, however many GPUs there are."""
POSITIVE = (
    "make",
    "frames",
    "height",
    "batch_size",
    "sequence_length",
    "stride",
    "image_size",
    "threads",
    "workers",
    "repeats",
)

PUBLISHED_VIDEOS, PUBLISHED_FRAMES = 173, 300
PUBLISHED_SECONDS = {0: 59.01, 1: 97.45, 2: 48.28, 4: 21.34}
"""Of one pass, by the number of GPUs; 0: PyTorch on the CPU. Batches of 8, 8 threads or workers, 1080p, DALI 1.6 and
decord on a Xeon Gold 5120 with Tesla V100s: what can be compared with ours are the ratios."""


@dataclass(frozen=True, kw_only=True)
class VideoBench:
    """How many frames a second loaders of clips deliver when nobody uses them: a table with ratios."""

    data: str | None = None
    """Folder of class folders of videos. Default: made ones."""
    make: int = 64
    """Without --data: how many videos to make, in a temporary folder."""
    codec: VideoCodec = "h264"
    """Of made videos."""
    frames: int = 300
    """Of each made video; every 30th is a keyframe."""
    height: int = 1080
    """Of made videos, pixels; their width is 16/9 of it."""
    gpus: str | None = None
    """Numbers of GPUs, such as 1,2,4; 0 is the CPU alone. Default: 1, or 0 on a machine with no GPU."""
    decoders: str | None = None
    """Numbers of clips that raydali decodes at once on each GPU, such as 1,7,14. Default: 3 for 2 video engines."""
    batch_size: int = 8
    """Clips of a batch, for each GPU."""
    sequence_length: int = 16
    """Frames of a clip."""
    stride: int = 1
    """From one frame of a clip to its next."""
    image_size: int = 224
    """Side of the square frames that are delivered, in pixels."""
    threads: int = 16
    """Of DALI, for each GPU."""
    workers: int = 8
    """Processes of torch's DataLoader."""
    seconds: float = 5.0
    """How long to measure each time, after a warm-up of a fifth of it."""
    repeats: int = 3
    """How often to measure; the median is reported, and the lowest and the highest."""
    loaders: str = ",".join(CHOICE)
    """Which to measure. torchcodec is left out where it is not installed, reader where there is no GPU."""
    pixels: str = ",".join(PIXELS)
    """All loaders deliver this: uint8 is frames in 8 bits, float32 normalised floats.
    Ratios are of loaders that deliver the same."""
    json: JsonFile = None
    seed_table: bool = False
    """Measure a published table again instead: 173 videos of 300 frames, batches of 8, 8 threads or workers."""


def main(options: VideoBench) -> dict[str, Any]:
    """Measure, show, write.

    Returns:
        What --json writes: {"command", "machine", "settings", "rows"}. A row: {"loader", "pixels" ("uint8" or
        "float32"), "gpus" (0: the CPU), "decoders" (null: the default), "frames_per_second" (over all GPUs, the
        median), "low", "high", "seconds" (measured, all repeats), "repeats" (each one's rate), "to_reader" (one
        pipeline on as many GPUs), "to_cpu" (the faster of pyav and torchcodec; all deliver the same), "scaling" (to
        itself at the fewest GPUs), "error"}; with --seed-table also "pass_seconds" and "published_seconds". What was
        not measured is null.

    Raises:
        UsageError: an option that cannot be met; before anything is measured.
        CommandFailed: a loader could not be measured; after the others' results were shown and written.
    """
    from raydali.data.sources.video.clips import VideoClips

    require_extra("video", "av", "videos")
    if options.seed_table:
        videos, frames = PUBLISHED_VIDEOS, PUBLISHED_FRAMES
        options = replace(options, make=videos, frames=frames, batch_size=8, sequence_length=30, threads=8, workers=8)
        options = replace(options, pixels="uint8")
    shared_options.check(options, positive=POSITIVE, loaders=CHOICE)
    shared_options.chosen("pixels", options.pixels, PIXELS)
    counts, decoders = shared_options.gpu_counts(options.gpus), _decoders(options.decoders)
    rows = _rows(options, counts, decoders)
    with made_videos(options.data, Made(options.codec, options.make, options.frames, options.height)) as root:
        clips = VideoClips.scan(root, sequence_length=options.sequence_length, stride=options.stride)
        needed = options.batch_size * max(1, *counts)
        if len(clips) < needed:
            raise UsageError(
                f"{len(clips)} clips are fewer than the {needed} that batches of {options.batch_size} on "
                f"{devices(max(counts))} take at once: lower --batch-size, or give more videos"
            )
        _measure(options, root, rows)
        settings = asdict(options) | {"videos": len(clips.videos), "clips": len(clips)}
    _add_ratios(rows)
    result = {"command": "bench video", "machine": machine(), "settings": settings, "rows": rows}
    _show(result)
    if options.json:
        write_json(result, options.json)
    require_measured(rows, _name)
    return result


def _decoders(listed: str | None) -> list[int | None]:
    if listed is None:
        return [None]
    counts = shared_options.integers(listed)
    if not counts or counts[0] < 1:
        raise UsageError(f"--decoders must be numbers of decoders such as 1,4,7, not {listed!r}: at least 1 each")
    return [*counts]


def _rows(options: VideoBench, counts: list[int], decoders: list[int | None]) -> list[dict[str, Any]]:
    from raydali.bench.video.contenders import VIDEO_LOADERS

    rows = []
    for name in shared_options.names(options.loaders):
        error = None if VIDEO_LOADERS[name].is_installed else NOT_INSTALLED
        for gpus in [min(1, counts[-1])] if name in ONE_PROCESS else counts:
            if name == "reader" and gpus == 0:
                continue
            for count, pixels in product(
                decoders if name == "raydali" else [None], shared_options.names(options.pixels)
            ):
                rows.append({"loader": name, "pixels": pixels, "gpus": gpus, "decoders": count, "error": error})
    if not rows:
        raise UsageError(f"--loaders {options.loaders} needs a GPU, and --gpus names none: add raydali or pyav")
    return rows


def _measure(options: VideoBench, root: str, rows: list[dict[str, Any]]) -> None:
    from raydali.bench.loader.interleaved import measure_in_turn
    from raydali.bench.video.contenders import VideoTask

    def task(row: dict[str, Any]) -> VideoTask:
        return VideoTask(
            loader=row["loader"],
            root=root,
            batch_size=options.batch_size,
            image_size=options.image_size,
            threads=options.threads,
            workers=options.workers,
            seconds=options.seconds,
            sequence_length=options.sequence_length,
            stride=options.stride,
            pixels=row["pixels"],
            decoders=row["decoders"],
        )

    measure_in_turn(rows, task, repeats=options.repeats, name=_name, unit="frames", units_each=options.sequence_length)
    if options.seed_table:
        for row in rows:
            rate = row["frames_per_second"]
            row["pass_seconds"] = PUBLISHED_VIDEOS * PUBLISHED_FRAMES / rate if rate else None
            row["published_seconds"] = PUBLISHED_SECONDS.get(0 if row["loader"] in ONE_PROCESS else row["gpus"])


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    def ratio(row: dict[str, Any], others: list[float]) -> float | None:
        return row["frames_per_second"] / others[0] if row["frames_per_second"] and others else None

    def rates(**wanted: Any) -> list[float]:
        fitting = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
        return [row["frames_per_second"] for row in fitting if row["frames_per_second"]]

    for row in rows:
        pixels = row["pixels"]
        on_cpu = sorted((rate for name in ONE_PROCESS for rate in rates(loader=name, pixels=pixels)), reverse=True)
        row["to_reader"] = ratio(row, rates(loader="reader", gpus=row["gpus"], pixels=pixels))
        row["to_cpu"] = ratio(row, on_cpu)
        own = rates(loader=row["loader"], decoders=row["decoders"], pixels=pixels)
        row["scaling"] = ratio(row, own) if row["gpus"] else None


def _name(row: dict[str, Any]) -> str:
    return f"{_loader(row)} on {devices(row['gpus'])}"


def _loader(row: dict[str, Any]) -> str:
    count = row["decoders"]
    return f"{contender(row)}, {plural(count, 'decoder')}" if count else contender(row)


def _show(result: dict[str, Any]) -> None:
    chosen = result["settings"]
    title = (
        f"{chosen['clips']:,} clips of {chosen['sequence_length']} frames in {chosen['videos']:,} videos, to "
        f"{chosen['image_size']} x {chosen['image_size']} pixels, batches of {chosen['batch_size']}, "
        f"{chosen['threads']} threads, {chosen['workers']} DataLoader workers; in 8 bits where it is not said otherwise"
    )
    columns = ["loader", "on", "frames/s", "lowest .. highest", "/ reader", "/ CPU", "scaling"]
    if chosen["seed_table"]:
        columns += ["seconds a pass", "published"]
    lines = []
    for row in result["rows"]:
        ratios = [number(row[name], ".2f") for name in ("to_reader", "to_cpu", "scaling")]
        line = [_loader(row), devices(row["gpus"]), number(row["frames_per_second"]), spread(row), *ratios]
        if chosen["seed_table"]:
            line += [number(row["pass_seconds"], ",.2f"), number(row["published_seconds"], ",.2f")]
        lines.append(line)
    show(title, columns, lines)
