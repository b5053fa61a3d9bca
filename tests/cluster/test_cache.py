"""--cache on a cluster of hosts with networks, homes and caches of their own, which read from one bucket."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from jobs.imagenet import DIGITS
from raydali.data.builtin.digits import digits_folder
from raydali.run.data_contents import CONTENTS
from raydali.run.folder import EPOCHS, RunFolder
from tests.support.chaos.nodes import Nodes
from tests.support.chaos.virtual_hosts import Host, namespaces_unavailable, virtual_hosts
from tests.support.chaos.watched_run import WatchedRun
from tests.support.cluster import IMAGENET, ROOT, command_line
from tests.support.networks import join_switch
from tests.support.object_stores import FlakyS3
from tests.support.traces import assert_whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(namespaces_unavailable()), reason="needs network namespaces"),
]
OPTIONS = ["--model", "digits", "--image-size", "32", "--resize-size", "32", "--batch-size", "8", "--no-ceiling"]
OPTIONS += ["--cache", "~/kept:100M", "--global-batch-size", "48", "--cpus-per-worker", "1", "--trace-samples"]
EPOCHS_OF_RUN = 8
STREAM = replace(DIGITS, epochs=EPOCHS_OF_RUN, batch_size=8, global_batch_size=48).stream(1437)


@dataclass(frozen=True)
class HostWithHome(Host):
    """A host with a home of its own, in which its cache lies.

    Attributes:
        home: its home.
    """

    home: str = ""

    def command(self, command: Sequence[str]) -> list[str]:
        return super().command(["env", f"HOME={self.home}", "XDG_CACHE_HOME=", *command])


@dataclass(frozen=True)
class Cluster:
    """A cluster with a bucket.

    Attributes:
        server: of the bucket.
        keys: of the images in it.
        folders: of the nodes' caches.
        run: the run on all nodes.
    """

    nodes: Nodes
    server: FlakyS3
    keys: list[str]
    folders: list[Path]
    run: WatchedRun

    def entries(self, number: int) -> int:
        """The number of entries of a node."""
        return sum(1 for _ in self.folders[number].glob("s3-bucket.*/*/*"))

    def reads(self) -> int:
        """How often the bucket has sent an image."""
        return sum(self.server.reads.values())

    def epochs(self) -> int:
        """The number of epochs that the run has recorded."""
        return len(self.run.folder.rows(EPOCHS))

    @property
    def images(self) -> int:
        """The number of images."""
        return len(self.keys)


@contextmanager
def cluster(tmp_path: Path, number: int, *options: str) -> Iterator[Cluster]:
    """A cluster of so many nodes, on which a run has started that reads the built-in digits from a bucket."""
    import boto3

    with virtual_hosts(number) as made:
        server = FlakyS3(join_switch(made))
        secrets = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        s3 = boto3.resource("s3", endpoint_url=server.url, region_name="us-east-1", **secrets)
        bucket = s3.create_bucket(Bucket="bucket")
        files = [*Path(digits_folder()).glob("*/*/*")]
        keys = [f"digits/{file.relative_to(digits_folder())}" for file in files]
        for file, key in zip(files, keys, strict=True):
            bucket.put_object(Key=key, Body=file.read_bytes())
        hosts = [HostWithHome(each.name, each.address, each.veth, str(tmp_path / each.name)) for each in made]
        for host in hosts:
            Path(host.home).mkdir()
        nodes = Nodes(
            hosts,
            folder=tmp_path,
            temp_dir=Path(f"/tmp/rdc-{os.getpid()}"),
            settings=server.variables,
        )
        command = [sys.executable, IMAGENET, *OPTIONS, *options, "--storage", str(tmp_path), "--name", "run"]
        run = WatchedRun(
            hosts[0].command([*command, "--data", "s3://bucket/digits"]),
            RunFolder(str(tmp_path), "run"),
            tmp_path / "log",
            cwd=ROOT,
            env={**nodes.env, "RAY_ADDRESS": nodes.address},
        )
        try:
            for each in range(number):
                nodes.start(each)
            run.start()
            yield Cluster(nodes, server, keys, [Path(host.home, "kept") for host in hosts], run)
        finally:
            run.kill()
            left = nodes.end()
            bucket.objects.all().delete()
            bucket.delete()
            server.stop()
        assert not left, [*map(command_line, left)]


MORE = 1.02
"""Readers that ask at the same time add some requests to one for each image; the driver reads CONTENTS of each set."""


def test_three_nodes_read_a_bucket_once_and_two_go_on_with_the_lost_part(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, "--workers", "2:3", "--epochs", str(EPOCHS_OF_RUN), "--checkpoint-every", "5") as those:
        run = those.run
        run.wait_for("three epochs", lambda: those.epochs() >= 3)
        held = [those.entries(number) for number in range(3)]
        before, rows = those.reads(), run.folder.rows(EPOCHS)[:3]
        assert not those.nodes.kill(2)
        run.finish(300)

        assert sorted(those.server.reads) == sorted(those.keys)
        assert those.images <= before <= MORE * those.images + 2 * CONTENTS
        assert sum(held) == those.images and min(held) > 0.8 * those.images / 3
        assert [row["cached"] for row in rows[1:]] == [1.0, 1.0]
        assert all(row["storage"]["peer_hits"] > 0.3 * those.images for row in rows[1:])

        again = those.reads() - before
        assert 0.9 * held[2] <= again <= 1.1 * held[2]
        assert sum(those.entries(number) for number in range(2)) == those.images
        rows = run.folder.rows(EPOCHS)
        assert [row["epoch"] for row in rows] == [*range(EPOCHS_OF_RUN)] and rows[-1]["cached"] == 1.0
        assert len({rank["node"] for rank in rows[-1]["ranks"]}) == 2
        assert_whole(run.folder, STREAM)


def test_a_cache_server_that_dies_is_warned_of_once_and_its_part_is_read_from_the_bucket(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, "--workers", "2", "--epochs", str(EPOCHS_OF_RUN)) as those:
        run = those.run
        run.wait_for("two epochs", lambda: those.epochs() >= 2)
        before, held = those.reads(), those.entries(1)
        children = [each for each in those.nodes.processes(1) if "host.child" in command_line(each)]
        min(children, key=lambda each: each.create_time()).kill()  # what reads and decodes is started later
        run.finish(300)

        assert before <= MORE * those.images + 2 * CONTENTS and run.output().count("does not answer") == 1
        assert f"cache of node {those.nodes.hosts[1].address} does not answer" in run.output()
        assert not {"failure", "resume"} & {event["event"] for event in run.events()}
        after = run.folder.rows(EPOCHS)[-2]["storage"]  # the last epoch is shorter
        assert 0.4 * held < after["requests"] < 0.6 * held
        assert after["requests"] + after["hits"] + after["peer_hits"] == pytest.approx(those.images, rel=0.05)
        assert_whole(run.folder, STREAM)
