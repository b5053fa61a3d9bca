"""`bench loader` on the CPU: rows, files and refusals. How fast anything is, no test says."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from PIL import Image
from torch.utils.dlpack import from_dlpack

from raydali.bench import loader
from raydali.bench.loader import ImageTask, LoaderBench
from raydali.bench.loader_rates import Delivered, Pixels, Task, measure
from raydali.bench.processes import MeasurementError
from raydali.bench.synthetic import folder_or, write_images
from raydali.data.load.loader import Batch
from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD
from raydali.errors import CommandError, UsageError
from tests.support import published_table
from tests.support.messages import mentioning, mentions

OPTIONS = LoaderBench(make=64, gpus="0", batch_size=16, image_size=32, threads=1, workers=1, seconds=0.3, repeats=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    write_images(str(folder), 20)
    return folder


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("measured what should have been refused")

    monkeypatch.setattr("raydali.bench.loader_rates.measure", refuse)
    monkeypatch.setattr("raydali.bench.synthetic.write_images", refuse)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_rows_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file = tmp_path / "loaders.json"
    names = ["raydali", "native", "torchvision", "synthetic"]
    options = replace(OPTIONS, loaders=",".join(names), pixels="float32", json=str(json_file))
    result = loader.main(options)

    assert [(row["loader"], row["pixels"]) for row in result["rows"]] == [(name, "float32") for name in names]
    for row in result["rows"]:
        assert row["gpus"] == 0 and row["error"] is None and row["scaling"] is None
        assert 0 < row["low"] <= row["images_per_second"] <= row["high"]
        assert row["seconds"] >= 0.3 and len(row["repeats"]) == 1
    rates = {row["loader"]: row["images_per_second"] for row in result["rows"]}
    assert result["rows"][0]["to_native"] == rates["raydali"] / rates["native"]
    assert result["rows"][0]["to_torchvision"] == rates["raydali"] / rates["torchvision"]

    assert json.loads(json_file.read_text()) == result
    assert result["command"] == "bench loader"
    assert {"cpus", "gpus", "python", "torch", "dali", "raydali"} == set(result["machine"])
    assert result["settings"]["images"] == 64 and 80_000 < result["settings"]["bytes_per_image"] < 180_000
    shown = capsys.readouterr().out
    assert all(name in shown for name in names) and f"{rates['native']:,.0f}" in shown
    assert "torchvision + normalised" in shown


@pytest.mark.parametrize("loader", ["raydali", "native", "torchvision"])
def test_all_loaders_deliver_the_same(folder: Path, loader: str) -> None:
    task = ImageTask(loader=loader, root=str(folder), batch_size=8, image_size=48, threads=1, workers=1, seconds=0.1)
    means = {}
    for pixels in get_args(Pixels):
        if pixels == "float16" and loader == "raydali":
            continue  # training normalises ours
        with closing(replace(task, pixels=pixels).batches()) as batches:
            delivered = [pixels_of(next(batches)) for _ in range(4)]
        assert {(images.shape, str(images.dtype)) for images in delivered} == {((8, 3, 48, 48), f"torch.{pixels}")}
        means[pixels] = torch.cat(delivered).double().mean((0, 2, 3))
    expected = (means["uint8"] / 255 - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    assert torch.allclose(means["float32"], expected, atol=0.25), means  # the images are not the same ones


def pixels_of(batch: Any) -> torch.Tensor:
    """A batch's images (N, 3, H, W), whatever loader it is of."""
    if isinstance(batch, Batch):
        return batch["images"]
    images = batch if isinstance(batch, torch.Tensor) else batch[0]
    if not isinstance(images, torch.Tensor):
        images = from_dlpack(images.as_tensor()).permute(0, 3, 1, 2).clone()
    return images


def test_ratios_are_of_loaders_that_deliver_the_same(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    images = {("raydali", "uint8"): 600, ("raydali", "float32"): 500, ("torchvision", "uint8"): 400}
    images |= {("torchvision", "float32"): 200, ("native", "float32"): 250, ("native", "uint8"): 300}
    images["synthetic", "uint8"] = 9000

    def measured(task: Task, _: int) -> list[Delivered]:
        return [Delivered(images[task.loader, task.pixels], 1.0)]

    monkeypatch.setattr("raydali.bench.loader_rates.measure", measured)
    options = replace(OPTIONS, data=str(folder), loaders="raydali,native,torchvision,synthetic")
    rows = {(row["loader"], row["pixels"]): row for row in loader.main(options)["rows"]}
    assert rows.keys() == images.keys()
    assert (rows["raydali", "uint8"]["to_torchvision"], rows["raydali", "float32"]["to_torchvision"]) == (1.5, 2.5)
    assert rows["raydali", "uint8"]["to_native"] == rows["raydali", "float32"]["to_native"] == 2
    with pytest.raises(UsageError, match=mentioning("--pixels half")):
        loader.main(replace(options, pixels="uint8,half"))


def test_the_time_is_estimated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.setattr("raydali.bench.loader_rates.measure", lambda *_: [Delivered(100, 1.0)])
    options = replace(OPTIONS, data=str(folder), loaders="raydali,native", pixels="uint8", seconds=5.0, repeats=3)
    assert [row["repeats"] for row in loader.main(options)["rows"]] == [[100.0] * 3] * 2
    first, *measurements = capsys.readouterr().err.splitlines()
    assert mentions(first, "3 2 rows 1 min 12 s") and len(measurements) == 6
    assert mentions(measurements[-1], "3/3 native 100")


def test_a_loader_that_fails_loses_no_other_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    def measured(task: Task, _: int) -> list[Delivered]:
        if task.loader == "native":
            raise MeasurementError("native, rank 0: Traceback ...\nOSError: no disk")
        return [Delivered(100, 0.5)]

    monkeypatch.setattr("raydali.bench.loader_rates.measure", measured)
    file = tmp_path / "result.json"
    options = replace(OPTIONS, data=str(folder), loaders="native,raydali", pixels="uint8", json=str(file))
    with pytest.raises(CommandError, match=r"native.* CPU.*\n.*no disk"):
        loader.main(options)
    native, raydali = json.loads(file.read_text())["rows"]
    assert "no disk" in native["error"] and native["images_per_second"] is None
    assert raydali["images_per_second"] == 200 and raydali["to_native"] is None and raydali["error"] is None


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "00").mkdir()
    (tmp_path / "00" / "broken.jpg").write_bytes(b"no JPEG")
    task = ImageTask(
        loader="native", root=str(tmp_path), batch_size=1, image_size=32, threads=1, workers=1, seconds=0.1
    )
    with pytest.raises(MeasurementError, match=r"(?s)native, rank 0: Traceback.*pipeline\.run.*Error"):
        measure(task, 0)


def test_a_killed_benchmark_leaves_no_process_behind(folder: Path) -> None:
    task = ImageTask(
        loader="synthetic", root=str(folder), batch_size=4, image_size=32, threads=1, workers=1, seconds=60
    )
    imports = "from raydali.bench.loader_rates import measure; from raydali.bench.loader import ImageTask"
    code = f"{imports}; measure({task}, 0)"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (started := [pid for pid in children.read_text().split() if is_rank(pid)]):
            time.sleep(0.05)
        parent.kill()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and any(map(is_rank, started)):
        time.sleep(0.05)
    left = [pid for pid in started if is_rank(pid)]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left


def is_rank(pid: str) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_medians_spread_and_scaling(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    images = {("raydali", 1): [90, 100, 130], ("raydali", 4): [360, 400, 380], ("torchvision", 1): [10, 10, 10]}

    def measured(task: Task, gpus: int) -> list[Delivered]:
        each = images[task.loader, gpus].pop(0)
        return [Delivered(each // gpus, 1.0)] * gpus

    monkeypatch.setattr("raydali.bench.loader_rates.measure", measured)
    monkeypatch.setattr("raydali.bench.common.gpu_names", lambda: ["Some GPU"] * 4)
    options = replace(OPTIONS, data=str(folder), batch_size=4, gpus="1,4", repeats=3, pixels="uint8")
    options = replace(options, loaders="raydali,torchvision")
    one, four, torchvision = loader.main(options)["rows"]
    assert (one["images_per_second"], one["low"], one["high"], one["scaling"]) == (100, 90, 130, 1)
    assert (four["gpus"], four["images_per_second"], four["scaling"], four["to_torchvision"]) == (4, 380, 3.8, 38)
    assert (torchvision["gpus"], torchvision["to_native"]) == (1, None)


def test_the_published_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    asked = []

    def measured(task: Task, gpus: int) -> list[Delivered]:
        asked.append(task)
        return [Delivered(200, 1.0)] if not gpus else [Delivered(4000, 1.0)] * gpus

    monkeypatch.setattr("raydali.bench.loader_rates.measure", measured)
    monkeypatch.setattr("raydali.bench.common.gpu_names", lambda: ["Some GPU"] * 4)
    result = published_table.main(replace(OPTIONS, data=str(folder), gpus="1,2,4"))
    assert {(task.image_size, task.batch_size, task.threads, task.workers) for task in asked} == {(640, 32, 8, 8)}
    cpu, one, two, four = result["rows"]
    assert cpu["published_seconds"] == 101.06 and cpu["published_scaling"] is None and cpu["gpus"] == 0
    assert cpu["pass_seconds"] == published_table.IMAGES / 200
    assert one["to_torchvision"] == 20 and round(one["published_to_torchvision"], 1) == 16.2
    assert two["scaling"] == 2 and round(four["published_scaling"], 2) == 3.97 and four["scaling"] == 4
    assert "16.20" in capsys.readouterr().out
    task = replace(asked[0], root=str(folder), batch_size=2, image_size=32, workers=1)
    for name in ("raydali", "torchvision"):
        with closing(replace(task, loader=name).batches()) as batches:
            assert pixels_of(next(batches)).shape == (2, 3, 32, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": "4"}, "--gpus 4 1"),
        ({"loaders": "raydali,dalli"}, "--loaders dalli raydali,native"),
        ({"batch_size": 65}, "64 65 --batch-size --make"),
        ({"seconds": 0.0}, "--seconds 0 0.0"),
        ({"data": "/nowhere"}, "/nowhere"),
    ],
)
@pytest.mark.usefixtures("no_measuring")
def test_bad_usage_is_refused_at_once(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydali.bench.common.gpu_names", lambda: ["Some GPU"])
    with pytest.raises(UsageError, match=mentioning(message)):
        loader.main(replace(OPTIONS, **changes))


@pytest.mark.usefixtures("no_measuring")
def test_fewer_images_than_a_batch_in_a_folder(folder: Path) -> None:
    with pytest.raises(UsageError, match=mentioning(f"20 images {folder} 32")):
        loader.main(replace(OPTIONS, data=str(folder), batch_size=32))


def test_made_images_are_the_same_each_time_and_gone_afterwards(folder: Path) -> None:
    with folder_or(None, partial(write_images, count=20)) as root:
        made = sorted(Path(root).rglob("*.jpg"))
        assert [file.read_bytes() for file in made] == [file.read_bytes() for file in sorted(folder.rglob("*.jpg"))]
        assert len({file.read_bytes() for file in made}) == 20
        sizes = []
        for file in made:
            with Image.open(file) as image:
                sizes.append(image.size)
        assert all(max(size) == 500 and min(size) >= 333 for size in sizes) and len(set(sizes)) > 2
    assert not Path(root).exists()
