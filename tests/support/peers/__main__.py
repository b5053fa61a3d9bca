"""The command of the scoreboard; the package's docstring describes it."""

import importlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

from raydali.bench import common
from raydali.errors import UsageError
from raydali.host.cpu_times import usable_cores
from raydali.host.facts import version
from raydali.output import JsonFile, gpu_names, parse_options, require_there, require_writable
from raydali.text import number
from tests.support.fast_s3 import NGINX, fast_s3
from tests.support.peers import PEERS, images_of
from tests.support.peers.chart import bars
from tests.support.peers.measure import Task, upload

Row = dict[str, Any]
START_SECONDS = 180
"""Limit for the start of a loader."""
SLOWNESS = 15
"""The segments may last this number of times longer than requested, because they end with whole rounds."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure loaders of several projects on the same images, each in a process of its own."""

    data: str
    """Local folder of class folders of JPEGs."""
    s3: str | None = None
    """s3://BUCKET/PREFIX: measure from there too; images and converted data are uploaded. AWS_ENDPOINT_URL and the
    other variables of AWS apply."""
    local_s3: bool = False
    """Measure from S3 too, which is a server on this machine: nginx, of Debian's package nginx-light."""
    peers: str = ",".join(PEERS)
    """Loaders to measure."""
    seconds: float = 5.0
    """Length of a measurement, after a warm-up of a fifth of it."""
    repeats: int = 3
    """Number of measurements, in turn; the median is reported, with the lowest and the highest."""
    threads: int = usable_cores()
    """Threads or worker processes of each loader. Default: the number of cores."""
    batch_size: int = 256
    """Images per batch."""
    image_size: int = 224
    """Height and width of the crops, in pixels."""
    train: bool = False
    """Measure training of ResNet-50 as well, and a batch that is on the device already."""
    compile: bool = False
    """Compile the training step."""
    json: JsonFile = None
    picture: str | None = None
    """File for a picture of the rates from disk, as SVG. The picture of those from S3 is NAME-s3.svg."""


def main(options: Options, timeout: float | None = None) -> dict[str, Any]:
    """Measure, show the table and write the files.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows"}. A row: {"peer", "name", "version", "from"
        ("disk" or "s3"), "images_per_second", "low", "high", "repeats", "to_raydali", "cpu_seconds_per_1000",
        "training_images_per_second", "prepare_seconds", "error"}. Null: not measured.

    Raises:
        UsageError: an option is invalid.
    """
    common.check(replace(options, data="."), peers=[*PEERS, "ceiling"])  # --data is checked here: it has no default
    require_there("--data", options.data)
    require_writable("--picture", options.picture)
    if options.local_s3 and options.s3:
        raise UsageError(f"--local-s3 and --s3 {options.s3} exclude each other: give one of them")
    if options.local_s3 and NGINX is None:
        raise UsageError("--local-s3 needs nginx: install Debian's package nginx-light")
    names = common.names(options.peers)
    if options.train and "ceiling" not in names:
        names.append("ceiling")
    count = len(images_of(options.data))
    if count < options.batch_size:
        raise UsageError(f"--data {options.data} has {count} JPEGs: give {options.batch_size}, or lower --batch-size")
    with tempfile.TemporaryDirectory(prefix="peers-") as work, server(options, Path(work)) as buckets:
        rows = [row for name in names for row in start(name, options, Path(work), buckets)]
        for _ in range(options.repeats):
            for row in rows:
                measure(row, options, Path(work), timeout or START_SECONDS + SLOWNESS * options.seconds)
    finish(rows)
    rows.sort(key=lambda row: (row["from"], -(row["images_per_second"] or 0)))
    result = common.result_of("peers", asdict(options) | {"images": count}, rows)
    title = f"{count:,} images to {options.image_size} x {options.image_size}, batches of {options.batch_size}, "
    title += f"{options.threads} threads, {', '.join(gpu_names()) or 'CPU'}; " + ", ".join(
        f"{name} {found}" for name, found in result["machine"].items() if isinstance(found, str)
    )
    common.present(result, options, title, columns(options))
    for line in notes(rows):
        print(line)
    if options.picture:
        picture = Path(options.picture)
        picture.write_text(bars(rows, "disk", title))
        if any(row["from"] == "s3" for row in rows):
            picture.with_stem(f"{picture.stem}-s3").write_text(bars(rows, "s3", title))
    return result


@contextmanager
def server(options: Options, work: Path) -> Iterator[Path | None]:
    """Run a server of S3 for --local-s3, and yield the folder whose folders are its buckets; else yield None."""
    if not options.local_s3:
        yield None
        return
    buckets = work / "s3"
    buckets.mkdir()
    with fast_s3(buckets) as running, patch.dict(os.environ, running.variables):
        yield buckets


def start(name: str, options: Options, work: Path, buckets: Path | None) -> list[Row]:
    """Return the rows of a loader; convert the images where it needs this, and copy them to S3."""
    peer = importlib.import_module(f"tests.support.peers.{name}")
    row: Row = {"peer": name, "name": peer.NAME, "version": version(peer.DISTRIBUTION), "from": "disk", "error": None}
    row |= {"source": str(Path(options.data).expanduser().absolute()), "prepare_seconds": None, "answers": []}
    if not installed(peer.PACKAGE):
        row["error"] = f"not installed: pip install {peer.DISTRIBUTION}"
    elif hasattr(peer, "prepare"):
        target = work / name
        target.mkdir()
        answer = child(Task(**shared(row, options, work), target=str(target)), work, 3600)
        row |= {"source": str(target), "prepare_seconds": answer.get("seconds"), "error": answer.get("error")}
    if not (options.s3 or buckets) or name == "ceiling":
        return [row]
    form = "images" if row["prepare_seconds"] is None else name
    remote = row | {"from": "s3", "source": f"{options.s3}/{form}" if options.s3 else f"s3://{form}"}
    remote |= {"answers": [], "error": row["error"] or getattr(peer, "NO_S3", None)}
    if not remote["error"] and options.s3:
        upload(row["source"], remote["source"])
    if not remote["error"] and buckets and not (buckets / form).exists():
        shutil.copytree(row["source"], buckets / form)
    return [row, remote]


def installed(package: str) -> bool:
    """Return True if a package can be found; its parents are imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def shared(row: Row, options: Options, work: Path) -> dict[str, Any]:
    """Return the fields of a task that measuring and converting have in common."""
    settings = {name: getattr(options, name) for name in ("threads", "batch_size", "image_size", "seconds")}
    device = "cuda:0" if gpu_names() else "cpu"
    return settings | {
        "peer": row["peer"],
        "source": row["source"],
        "device": device,
        "work": tempfile.mkdtemp(dir=work),
    }


def measure(row: Row, options: Options, work: Path, timeout: float) -> None:
    """Measure a row once more, unless it has failed."""
    if row["error"]:
        return
    task = Task(**shared(row, options, work), train=options.train, compile=options.compile)
    answer = child(task, work, timeout)
    row["error"] = answer.get("error")
    row["answers"].append(answer)
    rate = row["error"] or f"{number(answer['images_per_second'])} images/s"
    print(f"{row['name']} from {row['from']}: {rate}", file=sys.stderr, flush=True)


def child(task: Task, work: Path, timeout: float) -> dict[str, Any]:
    """Run a task in a process of its own, and end what it has started."""
    import psutil

    answer, log = Path(task.work, "answer.json"), work / f"{task.peer}.log"
    peer = importlib.import_module(f"tests.support.peers.{task.peer}")
    environment = os.environ | getattr(peer, "environment", lambda _: {})(tempfile.mkdtemp(dir=work))
    command = [sys.executable, "-m", "tests.support.peers.measure", json.dumps(asdict(task)), str(answer)]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    started: set[psutil.Process] = set()
    reason = ""
    try:
        while reason == "":
            started.update(psutil.Process(process.pid).children(recursive=True))
            try:
                code = process.wait(min(1, timeout))
                reason = f"the process ended with exit code {code}"
            except subprocess.TimeoutExpired:
                timeout -= 1
                reason = "" if timeout > 0 else "no result in time: raise --seconds, or lower --threads"
    except psutil.NoSuchProcess:
        process.wait()
    finally:
        for each in [*started, process]:
            try:
                each.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        process.wait()
    if answer.exists():
        return dict(json.loads(answer.read_text()))
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return {"error": ": ".join([reason, *last])}


def finish(rows: list[Row]) -> None:
    """Compute a row's figures of its repeats, and the ratios to raydali."""
    for row in rows:
        answers = [] if row["error"] else row.pop("answers")
        row.pop("answers", None), row.pop("source")
        for key in ("images_per_second", "cpu_seconds_per_1000", "training_images_per_second"):
            values = [answer[key] for answer in answers if key in answer]
            row[key] = statistics.median(values) if values else None
        row["repeats"] = [answer["images_per_second"] for answer in answers]
        row["low"], row["high"] = min(row["repeats"], default=None), max(row["repeats"], default=None)
        if row["peer"] == "ceiling":  # loads nothing
            row |= dict.fromkeys(("images_per_second", "cpu_seconds_per_1000", "low", "high"))
    ours = {row["from"]: row["images_per_second"] for row in rows if row["peer"] == "raydali"}
    for row in rows:
        row["to_raydali"] = common.ratio(row["images_per_second"], ours.get(row["from"]))


def columns(options: Options) -> dict[str, Any]:
    """Return the columns of the table."""
    training = {"ResNet-50, images/s": common.cell("training_images_per_second")} if options.train else {}
    return {
        "loader": lambda row: f"{row['name']} {row['version']}",
        "from": lambda row: row["from"],
        "images/s": common.cell("images_per_second"),
        "lowest .. highest": common.spread,
        "/ raydali": common.cell("to_raydali", ".2f"),
        **training,
        "CPU s / 1,000 images": common.cell("cpu_seconds_per_1000", ".2f"),
        "conversion, s": common.cell("prepare_seconds", ".1f"),
    }


def notes(rows: list[Row]) -> list[str]:
    """Return lines that say what was not measured, and where another loader is ahead of raydali."""
    lines = [f"{row['name']} from {row['from']}: {row['error']}" for row in rows if row["error"]]
    better = {"images_per_second": max, "training_images_per_second": max, "cpu_seconds_per_1000": min}
    for place in ("disk", "s3"):
        for key, best in better.items():
            there = [row for row in rows if row["from"] == place and row[key] and row["peer"] != "ceiling"]
            first = best(there, key=itemgetter(key), default=None)
            if first and first["peer"] != "raydali":
                lines.append(f"raydali is not first: {first['name']} has the best {key.replace('_', ' ')} from {place}")
    return lines


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    try:
        main(parse_options(Options, sys.argv[1:], "python -m tests.support.peers"))
    except UsageError as error:
        sys.exit(f"error: {error}")
