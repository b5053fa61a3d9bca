"""`raydali doctor`: what is found on made-up hosts, what is said of it, and a run on this very host."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydali.commands import doctor
from raydali.commands.doctor import Doctor, Marker, main
from raydali.errors import UsageError
from raydali.host import checks
from raydali.host.checks import Node, Row, failed_checks, rows
from raydali.host.facts import Gpu, Host, this_host
from tests.support.messages import mentioning, mentions

VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.15.0", "raydali": "0.1.0"}
GPU = Gpu(name="NVIDIA H200", free=138 << 30, total=140 << 30)
GOOD = Host(
    name="good",
    driver="580.95.05",
    gpus=(GPU, GPU),
    nvjpeg="",
    nvdec="",
    cuda="13.2",
    shared_memory=64 << 30,
    open_files=1048576,
    versions=VERSIONS,
)
CPU_ONLY = replace(GOOD, driver="", gpus=(), nvjpeg="no library", nvdec="no library")


def failing(host: Host, **facts: Any) -> list[Row]:
    return [row for row in rows([Node(name=host.name, host=host, **facts)]) if row.status == "fail"]


def test_a_good_host_passes() -> None:
    found = rows([Node(name="good", host=GOOD, skew=(0.1, 0.01), storage="")])
    assert {row.status for row in found} == {"ok"}
    assert [row.check for row in found] == [
        *("driver", "nvJPEG", "NVDEC", "GPU memory", "/dev/shm", "open files", "clock", "storage"),
        *VERSIONS,
    ]


def test_on_a_machine_with_no_gpu_nothing_of_gpus_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydali.host.facts.kernel_sees_gpu", lambda: False)
    found = {row.check: row for row in rows([Node(name="cpu", host=CPU_ONLY)])}
    for check in ("driver", "nvJPEG", "NVDEC", "GPU memory"):
        assert (found[check].status, found[check].found) == ("none", "no GPU")
    assert not failing(CPU_ONLY)


@pytest.mark.parametrize(
    ("changes", "check", "found", "remedy"),
    [
        ({"driver": "570.86"}, "driver", "570.86, too old for torch's CUDA 13.2", "580.65 or newer"),
        ({"driver": "520.61", "cuda": "12.8"}, "driver", "too old for torch's CUDA 12.8", "525.60 or newer"),
        ({"nvjpeg": "libnvjpeg.so.12: cannot open"}, "nvJPEG", "cannot open", "pip install nvidia-nvjpeg-cu12"),
        ({"nvdec": "libnvcuvid.so.1: cannot open"}, "NVDEC", "cannot open", "NVIDIA_DRIVER_CAPABILITIES"),
        ({"gpus": (GPU, replace(GPU, free=3 << 30))}, "GPU memory", "2 x NVIDIA H200; 3 GiB free on 1", "nvidia-smi"),
        ({"shared_memory": 64 << 20}, "/dev/shm", "0.06 GiB", "--shm-size"),
        ({"open_files": 1024}, "open files", "1024", "ulimit"),
    ],
)
def test_what_is_not_well_is_named_with_its_remedy(
    changes: dict[str, Any], check: str, found: str, remedy: str
) -> None:
    (row,) = failing(replace(GOOD, **changes))
    assert row.check == check and found in row.found and remedy in row.remedy and row.nodes == ("good",)


def test_a_gpu_without_its_driver_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydali.host.facts.kernel_sees_gpu", lambda: True)
    found = failing(replace(CPU_ONLY, nvjpeg="", nvdec=""))
    assert [row.check for row in found] == ["driver"] and "GPU" in found[0].found


def test_of_the_cluster_clock_storage_and_silence() -> None:
    found = [*failing(GOOD, skew=(-7.3, 0.2)), *failing(GOOD, storage="s3://b: 403")]
    found += rows([Node(name="lost", silence="60 s")])
    assert [(row.check, row.found) for row in found] == [
        ("clock", "-7.3 s"),
        ("storage", "s3://b: 403"),
        ("answers", "60 s"),
    ]
    assert all(row.remedy for row in found)
    assert not failing(GOOD, skew=(2.5, 1.0))  # slower calls than the clocks differ say nothing


def test_nodes_of_which_the_same_is_to_be_said_share_a_row() -> None:
    nodes = [Node(name=f"n{i}", host=GOOD) for i in range(5)]
    nodes[3] = Node(name="n3", host=replace(GOOD, open_files=1024))
    found = [row for row in rows(nodes) if row.check == "open files"]
    assert sorted((row.status, row.nodes) for row in found) == [("fail", ("n3",)), ("ok", ("n0", "n1", "n2", "n4"))]
    assert mentions(doctor._named(found[0].nodes, 5), "n0 n1 n2 1") and "n4" not in doctor._named(found[0].nodes, 5)
    assert doctor._named(("a", "b"), 2) == "all 2"


def test_versions_must_be_the_same_on_all_nodes() -> None:
    nodes = [Node(name=f"n{i}", host=GOOD) for i in range(3)]
    other = {"ray": "2.59.0", "torch": "", "raydali": ""}
    nodes.append(Node(name="odd", host=replace(GOOD, versions=VERSIONS | other)))
    ray, torch = (row for row in rows(nodes) if row.status == "fail")
    assert (ray.check, ray.found, ray.nodes) == ("ray", "2.59.0", ("odd",)) and mentions(ray.remedy, "2.60.0")
    assert (torch.check, torch.nodes) == ("torch", ("odd",)) and mentions(torch.remedy, "2.15.0")
    assert any(row.found.startswith("not installed") for row in rows(nodes))


def test_workers_name_a_host_that_spoils_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "this_host", lambda: replace(GOOD, nvjpeg="libnvjpeg.so.12: cannot open", nvdec="no"))
    (line,) = failed_checks()
    assert line.startswith("good: nvJPEG: libnvjpeg.so.12: cannot open: pip install nvidia-nvjpeg-cu12")
    monkeypatch.setattr(checks, "this_host", lambda: GOOD)
    assert failed_checks() == []


def test_storage_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    marker = Marker(str(tmp_path / "runs"), "key")
    assert marker.write_error() == "" and marker.read_error() == ""
    marker.remove()
    assert list((tmp_path / "runs").iterdir()) == []
    assert mentions(marker.read_error(), "driver not here")
    (tmp_path / "file").write_text("")
    assert "file" in Marker(str(tmp_path / "file"), "key").write_error()


def test_the_exit_code_says_whether_a_row_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("raydali.commands.doctor.this_host", lambda: GOOD)
    main(Doctor())
    table = capsys.readouterr().out
    assert "580.95.05" in table and "remedy" in table
    monkeypatch.setattr("raydali.commands.doctor.this_host", lambda: replace(GOOD, nvjpeg="[Errno 2] no"))
    with pytest.raises(SystemExit) as left:
        main(Doctor())
    assert left.value.code == 1
    table = capsys.readouterr().out
    assert "[Errno 2] no" in table and "pip install nvidia-nvjpeg-cu12" in table


def test_without_a_cluster_or_an_answer_it_is_bad_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError, match=mentioning("--cluster RAY_ADDRESS")):
        main(Doctor(cluster=True))
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match=mentioning("RAY_ADDRESS=http://127.0.0.1:9")):
        main(Doctor(cluster=True))
    with pytest.raises(UsageError, match=mentioning("--json no/such/found.json")):
        main(Doctor(cluster=True, json="no/such/found.json"))


def test_this_host_is_looked_at_without_torch_or_ray(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom raydali import cli\ntry:\n    cli.main(sys.argv[1:])\n"
        "finally:\n    assert not {'torch', 'ray'} & set(sys.modules)"
    )
    arguments = ["doctor", "--json", "-", "--storage", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    (node,) = found["nodes"]
    assert node["storage"] == "" and node["host"]["versions"]["torch"] and node["host"]["cuda"]
    assert done.returncode == any(row["status"] == "fail" for row in found["rows"])
    assert this_host().versions == node["host"]["versions"]
