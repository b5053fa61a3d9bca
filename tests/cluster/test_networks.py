"""A cluster of several hosts with networks of their own, ports closed but for those that docs/clusters.md names."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.imagenet import Config
from raydali.data.builtin.digits import digits_folder
from raydali.run.folder import RunFolder
from tests.support.chaos.virtual_hosts import Host
from tests.support.cluster import RAY, ROOT, descendants, environment, kill, name_of, wait_until_gone
from tests.support.networks import firewalled_hosts, require_hosts
from tests.support.traces import assert_whole, read_samples

TOKEN = "0123456789abcdef" * 4
IMAGES = {"train": 240, "val": 40}
OPTIONS = ["--model", "resnet18", "--image-size", "32", "--batch-size", "8", "--global-batch-size", "24"]
OPTIONS += ["--epochs", "6", "--cpus-per-worker", "1", "--checkpoint-every", "5", "--trace-samples", "--no-ceiling"]
START = [RAY, "start", "--block", "--num-cpus=1", "--disable-usage-stats", "--object-manager-port=8076"]
START += ["--node-manager-port=8077", "--dashboard-agent-grpc-port=8078", "--runtime-env-agent-port=8079"]
START += ["--metrics-export-port=8080", "--dashboard-agent-listen-port=52365"]
START += ["--min-worker-port=10002", "--max-worker-port=10999"]


def documented_ports() -> list[str]:
    """Those of the table in docs/clusters.md."""
    section = (ROOT / "docs/clusters.md").read_text().partition("## Ports")[2].partition("\n## ")[0]
    ports = re.findall(r"^\| `([\d-]+)` \|", section, re.MULTILINE)
    assert "6379" in ports and len(ports) > 5
    return ports


@contextmanager
def cluster(members: Sequence[Host], env: dict[str, str], folder: Path) -> Iterator[list[int]]:
    """Ray on these hosts, the first one its head; the processes that were started. In the end they are killed."""
    head, temp_dir = members[0], f"/tmp/{members[0].name}"
    started: list[subprocess.Popen[bytes]] = []

    def start(host: Host, *arguments: str) -> None:
        command = host.command([*START, f"--node-ip-address={host.address}", *arguments])
        with (folder / f"{host.name}.log").open("wb") as log:
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))

    def logs() -> str:
        return "\n".join(path.read_text() for path in folder.glob("*.log"))

    def wait_for(nodes: int) -> None:
        deadline = time.monotonic() + 120
        while alive(head.address) != nodes:
            assert time.monotonic() < deadline and all(each.poll() is None for each in started), logs()
            time.sleep(0.5)

    try:
        start(head, "--head", "--port=6379", f"--dashboard-host={head.address}", f"--temp-dir={temp_dir}")
        wait_for(1)
        for number, host in enumerate(members[1:], 2):
            start(host, f"--address={head.address}:6379")
            wait_for(number)  # at the same moment two would take the same names in the folder that they share here
        yield [each.pid for each in started]
    finally:
        pids = [pid for each in started for pid in [each.pid, *descendants(each.pid)]]
        kill(pids)
        for each in started:
            each.wait()
        left = wait_until_gone(pids, timeout=90)
        shutil.rmtree(temp_dir, ignore_errors=True)
        assert not left, left


def alive(head: str) -> int:
    """The nodes that a head's dashboard counts as alive."""
    request = urllib.request.Request(
        f"http://{head}:8265/nodes?view=summary", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            nodes = json.load(answer)["data"]["summary"]
    except OSError:
        return 0
    return sum(node["raylet"].get("state") == "ALIVE" for node in nodes)


def train(host: Host, env: dict[str, str], log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """The job, its driver on this host."""
    command = host.command([sys.executable, "jobs/imagenet.py", *OPTIONS, *arguments])
    with log.open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_hosts_train_from_a_bucket_and_two_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_hosts()
    boto3 = pytest.importorskip("boto3")
    from moto.server import ThreadedMotoServer

    with firewalled_hosts(3, documented_ports()) as (members, here):
        server = ThreadedMotoServer(ip_address=here, port=0, verbose=False)
        server.start()
        secrets = {
            "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        for name, value in secrets.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        for split, images in IMAGES.items():
            files = sorted(Path(digits_folder(), split).glob("*/*"))
            for file in (files[i * len(files) // images] for i in range(images)):
                client.upload_file(str(file), "bucket", f"digits/{split}/{file.parent.name}/{file.name}")
        home = tmp_path / "home"
        home.mkdir()
        # Each of the image store's addresses is that of a bucket in the path, as moto knows them.
        env = environment(home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN, RAY_USAGE_STATS_ENABLED="0", **secrets)
        job = ["--data", "s3://bucket/digits", "--storage", "s3://bucket/runs", "--name", "hosts"]
        folder = RunFolder("s3://bucket/runs", "hosts")
        try:
            with cluster(members, env, tmp_path) as pids:
                env["RAY_ADDRESS"] = f"{members[0].address}:6379"
                driver = train(members[0], env, tmp_path / "first.txt", *job, "--workers", "3")
                deadline = time.monotonic() + 240
                while len([name for name in folder.folders() if name.startswith("checkpoint_")]) < 2:
                    said = (tmp_path / "first.txt").read_text()
                    assert driver.poll() is None and time.monotonic() < deadline, said
                    time.sleep(0.2)
                trainers = {
                    pid: [name_of(below) for below in descendants(pid) if "RayTrainWorker" in name_of(below)]
                    for pid in pids
                }
                assert [len(names) for names in trainers.values()] == [1, 1, 1]
                kill([driver.pid, *descendants(driver.pid)])
                driver.wait()
            # All three hosts are gone, their Ray too; two begin anew, with another head.
            with cluster(members[1:], env, tmp_path):
                env["RAY_ADDRESS"] = f"{members[1].address}:6379"
                # On the head as before: the hosts share their files, by which Ray finds out where a driver is.
                driver = train(members[1], env, tmp_path / "second.txt", *job, "--workers", "2")
                assert driver.wait(300) == 0, (tmp_path / "second.txt").read_text()
            config = Config(data="-", epochs=6, batch_size=8, global_batch_size=24)
            assert_whole(folder, config.stream(IMAGES["train"]))
            assert set(read_samples(folder)["rank"].to_pylist()) == {0, 1, 2}
            events = folder.rows("events.jsonl")
            assert [event["event"] for event in events] == ["start", "checkpoint", "resume", "finish"]
            assert [event.get("world_size") for event in events] == [3, None, 2, None]
            rows = folder.rows("epochs.jsonl")
            assert [row["epoch"] for row in rows] == list(range(6))
            assert len({rank["node"] for rank in rows[-1]["ranks"]}) == 2
        finally:
            server.stop()
