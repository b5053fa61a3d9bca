"""The scoreboard of loaders: every loader is in the table, and the table, the file and the picture agree."""

import importlib
import json
import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from raydali.bench.synthetic import write_images
from tests.support.fast_s3 import NGINX
from tests.support.messages import mentions
from tests.support.object_stores import PutObjects
from tests.support.peers import PEERS, images_of, read, spdl, webdataset
from tests.support.peers.__main__ import Options, main, notes
from tests.support.peers.measure import upload
from tests.support.peers.scripts import step_seconds, times


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    write_images(str(folder), 32)
    return folder


def options(folder: Path, peers: str, **others: Any) -> Options:
    sizes = {"batch_size": 8, "image_size": 32, "threads": 1, "repeats": 1, "seconds": 0.2}
    return Options(data=str(folder), peers=peers, **sizes, **others)  # type: ignore[arg-type]


@pytest.mark.slow  # each loader starts a process, which imports torch
def test_table_file_and_picture(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webdataset, "PACKAGE", "no_such_package")
    monkeypatch.setattr(spdl, "environment", lambda _: {"PYTHONPATH": str(tmp_path)}, raising=False)
    (tmp_path / "spdl.py").write_text("")  # it can be found, and lacks everything
    files = {"json": str(tmp_path / "peers.json"), "picture": str(tmp_path / "peers.svg")}
    monkeypatch.syspath_prepend(str(tmp_path))
    result = main(options(folder, "raydali,dataloader,webdataset,spdl", **files))

    rows = {row["peer"]: row for row in result["rows"]}
    shown = capsys.readouterr().out
    assert len(rows) == 4 and all(row["name"] in shown for row in rows.values())
    assert "not installed" in rows["webdataset"]["error"] and rows["webdataset"]["error"] in shown
    assert "spdl" in rows["spdl"]["error"] and rows["spdl"]["error"] in shown
    for name in ("raydali", "dataloader"):
        assert rows[name]["error"] is None and rows[name]["images_per_second"] > 0
        assert rows[name]["cpu_seconds_per_1000"] > 0 and f"{rows[name]['images_per_second']:,.0f}" in shown
    assert rows["dataloader"]["to_raydali"] == (
        rows["dataloader"]["images_per_second"] / rows["raydali"]["images_per_second"]
    )
    assert json.loads((tmp_path / "peers.json").read_text()) == result
    assert result["settings"]["images"] == 32

    texts = [text.text for text in ET.parse(tmp_path / "peers.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert [row["name"] in texts for row in rows.values()] == [True] * 4
    assert f"{rows['raydali']['images_per_second']:,.0f}" in texts


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="needs Debian's nginx-light")
def test_a_server_on_this_machine_is_measured_as_well(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "peers.svg"
    before = sorted(os.environ.items())
    result = main(options(folder, "raydali,dali", local_s3=True, picture=str(picture)))
    rows = {(row["peer"], row["from"]): row for row in result["rows"]}
    assert len(rows) == 4 and all(row["error"] is None and row["images_per_second"] > 0 for row in rows.values())
    assert rows["raydali", "s3"]["to_raydali"] == 1
    texts = (tmp_path / "peers-s3.svg").read_text()
    assert f"{rows['dali', 's3']['images_per_second']:,.0f}" in texts and "S3" in texts
    assert f"{rows['dali', 'disk']['images_per_second']:,.0f}" in picture.read_text()
    assert sorted(os.environ.items()) == before


def test_notes_say_where_another_loader_is_ahead() -> None:
    row = {"from": "disk", "error": None, "training_images_per_second": None}
    ours = row | {"peer": "raydali", "name": "raydali", "images_per_second": 10.0, "cpu_seconds_per_1000": 1.0}
    other = row | {"peer": "dali", "name": "DALI", "images_per_second": 9.0, "cpu_seconds_per_1000": 2.0}
    assert notes([ours, other]) == []
    (said,) = notes([ours, other | {"cpu_seconds_per_1000": 0.5}])
    assert mentions(said, "DALI cpu disk")


def test_every_loader_has_its_names() -> None:
    for name in PEERS:
        peer = importlib.import_module(f"tests.support.peers.{name}")
        assert peer.NAME and peer.PACKAGE and peer.DISTRIBUTION and callable(peer.batches)


def test_objects_are_listed_and_read_as_files(folder: Path, s3: PutObjects) -> None:
    s3("peers", {})
    upload(str(folder), "s3://peers/images")
    there, here = images_of("s3://peers/images"), images_of(str(folder))
    assert [(path.rpartition("/")[2], label) for path, label in there] == [
        (path.rpartition("/")[2], label) for path, label in here
    ]
    assert read(there[3][0]) == read(here[3][0])


def test_times_of_scripts() -> None:
    timm = "Train: 0 [  50/100 ( 50%)]  Loss: 6.9 (6.9)  Time: 0.100s, 2560.00/s  (0.125s, 2048.00/s)  LR: 1.0e-02"
    torchvision = "Epoch: [0]  [ 3/10]  eta: 0:00:01  lr: 0.5  img/s: 1234.5  loss: 6.9 (7.0)  time: 0.2  data: 0.1"
    test = "Test:   [0/1]  eta: 0:00:00  loss: 6.6 (6.6)  time: 0.7  data: 0.5"
    assert times("timm", f"{timm}\n{timm}") == [0.1, 0.1]
    assert times("torchvision", f"{torchvision}\n{test}\n") == [0.2]


@pytest.mark.slow
def test_the_second_half_of_a_script_is_measured(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time\n"
        "for seconds in (9.0, 9.0, 0.1, 0.3):\n"
        "    print(f'Train: 0 [  1/9 ( 1%)]  Loss: 6.9 (6.9)  Time: {seconds:.3f}s,  1.00/s')\n"
        "time.sleep(600)\n"
    )
    assert step_seconds("timm", [sys.executable, str(script)], 3, pytest.fail) == pytest.approx(0.2)
    said: list[str] = []
    assert step_seconds("timm", [sys.executable, "-c", "print('no such data')"], 60, said.append) is None
    assert said[0].startswith("timm: ") and "no such data" in said[0]
