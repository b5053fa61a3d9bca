"""The cache of several nodes: each node here is a folder and a server process of its own."""

import multiprocessing
import os
import pickle
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from raydali.data.read import objects, storage
from raydali.data.read.node_cache import cache_entries, cache_peers
from raydali.data.read.node_cache.cache_entries import HASH_BYTES, CacheOption, Entries
from raydali.data.read.node_cache.cache_peers import Peers, serve
from raydali.data.read.node_cache.node_cache import TAG_BYTES, NodeCache, key_of, owner_of
from raydali.data.read.read_counts import COUNTS
from raydali.data.read.storage import ObjectPart
from raydali.errors import UsageError
from raydali.host.child import Child
from tests.support.disks import small_disk
from tests.support.messages import mentioning
from tests.support.trees import bytes_of

SAMPLES, BYTES = 1200, 500
END_BYTES = TAG_BYTES + HASH_BYTES
PARTS = [ObjectPart(f"s3://bucket/{number}.jpg") for number in range(SAMPLES)]


def content(part: ObjectPart) -> memoryview:
    return memoryview(part.uri.encode() + bytes(BYTES - len(part.uri)))


class Bucket:
    """Counts what is read from it."""

    def __init__(self) -> None:
        self.read: list[ObjectPart] = []

    def fetch(self, part: ObjectPart) -> tuple[memoryview, int]:
        self.read.append(part)
        return content(part), 7


class Node:
    """One rank of a worker group, alone on its node."""

    def __init__(self, folder: Path, size: int, token: bytes) -> None:
        self.entries = Entries(CacheOption(str(folder), size))
        self.server = Child("cache server")
        self.port = self.server.call(serve, str(folder), size, "127.0.0.1", token)
        self.make: Callable[[], NodeCache]
        self.cache: NodeCache


@contextmanager
def group(folders: Sequence[Path], size: int) -> Iterator[list[Node]]:
    """A worker group with one node for each folder; its copies have arrived at the end."""
    token = secrets.token_bytes(16)
    with ExitStack() as stack:
        nodes = [Node(folder, size, token) for folder in folders]
        for node in nodes:
            stack.callback(node.server.close)
        ids = sorted(node.entries.node for node in nodes)
        folders_of = {node.entries.node: folder for node, folder in zip(nodes, folders, strict=True)}
        earlier = [of for node in nodes for of in node.entries.groups(ids)]
        for node in nodes:
            others = {each.entries.node: [("127.0.0.1", each.port)] for each in nodes if each is not node}
            own = CacheOption(str(folders_of[node.entries.node]), size)
            node.make = partial(NodeCache, own, others, token, ids, earlier)
            node.cache = node.make()
        yield nodes
        for node in nodes:
            node.cache.close()


def epoch(nodes: Sequence[Node], bucket: Bucket, seed: int, parts: Sequence[ObjectPart] = PARTS) -> None:
    """Each sample once, on any node, in batches of eight."""
    order = np.random.default_rng(seed).permutation(len(parts))
    for turn, batch in enumerate(np.array_split(order, len(order) // 8)):
        wanted = [parts[id] for id in batch]
        found = [nodes[turn % len(nodes)].cache.read(part, bucket.fetch) for part in wanted]
        assert [bytes(each) for each in found] == [bytes(content(part)) for part in wanted]


def settle(nodes: Sequence[Node]) -> None:
    """Wait for the copies that are under way."""
    for node in nodes:
        node.cache.close()
        node.cache = node.make()


def folders(path: Path, number: int) -> list[Path]:
    return [path / f"node{place}" for place in range(number)]


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.slow
def test_with_room_for_all_the_bucket_is_read_once(tmp_path: Path, nodes: int) -> None:
    bucket = Bucket()
    for start in range(2):  # a restart keeps the entries
        with group(folders(tmp_path, nodes), 10**8) as those:
            epoch(those, bucket, start)
    assert sorted(bucket.read) == sorted(PARTS)
    held = [
        sum(file.is_file() for file in folder.glob("s3-bucket.unversioned/*/*")) for folder in folders(tmp_path, nodes)
    ]
    assert sum(held) == SAMPLES and min(held) > 0.85 * SAMPLES / nodes


@pytest.mark.parametrize("share", [0.5, pytest.param(0.1, marks=pytest.mark.slow)])
def test_the_hit_rate_is_the_capacity(tmp_path: Path, share: float) -> None:
    size = int(share * SAMPLES * (BYTES + END_BYTES) / 2)
    with group(folders(tmp_path, 2), size) as nodes:
        epoch(nodes, Bucket(), 0)
    for seed in (1, 2):
        bucket = Bucket()
        with group(folders(tmp_path, 2), size) as nodes:
            epoch(nodes, bucket, seed)
            assert all(node.entries.used <= size for node in nodes)
        assert 1 - len(bucket.read) / SAMPLES == pytest.approx(share, abs=0.01)


@pytest.mark.slow
def test_a_third_node_takes_what_the_others_have(tmp_path: Path) -> None:
    bucket = Bucket()
    with group(folders(tmp_path, 2), 10**8) as nodes:
        epoch(nodes, bucket, 0)
        before = [owner_of(key_of(part), sorted(node.entries.node for node in nodes)) for part in PARTS]
    with group(folders(tmp_path, 3), 10**8) as nodes:
        epoch(nodes, bucket, 1)
        after = [owner_of(key_of(part), sorted(node.entries.node for node in nodes)) for part in PARTS]
        third = nodes[2].entries.node
    assert len(bucket.read) == SAMPLES
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {third} and len(moved) <= 1.1 * SAMPLES / 3


@pytest.mark.slow
def test_the_part_of_a_node_that_is_gone_is_read_from_the_bucket_once(tmp_path: Path) -> None:
    three = folders(tmp_path, 3)
    with group(three, 10**8) as nodes:
        epoch(nodes, Bucket(), 0)
    lost = sum(1 for _ in three[2].glob("s3-bucket.unversioned/*/*"))
    bucket = Bucket()
    for seed in (1, 2):
        with group(three[:2], 10**8) as nodes:
            epoch(nodes, bucket, seed)
    assert len(bucket.read) == len({*bucket.read}) == lost


def test_a_server_that_dies_while_it_serves_costs_reads_of_the_bucket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_peers, "AWAY_SECONDS", 0.0)  # each batch asks it again
    with group(folders(tmp_path, 2), 10**8) as nodes:
        epoch(nodes, Bucket(), 0)
        settle(nodes)
        bucket = Bucket()
        epoch(nodes, bucket, 1, PARTS[:80])
        assert not bucket.read
        nodes[1].server.close()
        epoch(nodes[:1], bucket, 2)
        assert 0 < len(bucket.read) < SAMPLES
    assert sum("cache of node 127.0.0.1 does not answer" in line for line in caplog.messages) == 1


def test_a_server_that_refuses_connections_costs_reads_of_the_bucket(tmp_path: Path) -> None:
    bucket = Bucket()
    with group(folders(tmp_path, 2), 10**8) as nodes:
        nodes[1].server.close()
        epoch(nodes[:1], bucket, 0)
    assert sorted(bucket.read) == sorted(PARTS)


@pytest.mark.slow
def test_forks_read_at_the_same_time_and_copy_what_they_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket()
    monkeypatch.setattr(storage, "fetch", bucket.fetch)

    def read(parts: Sequence[ObjectPart]) -> None:
        for begin in range(0, len(parts), 8):
            wanted = parts[begin : begin + 8]
            assert bytes_of(objects.read_objects(wanted)) == [*map(bytes, map(content, wanted))]

    def fork(share: int) -> None:
        bucket.read.clear()
        COUNTS.take()
        read([*PARTS[:600], *PARTS[600 + share :: 4]])
        cache = objects._cache_of(pickle.dumps(nodes[0].make), os.getpid())
        cache.close()
        os._exit(0 if len(bucket.read) == 150 and not COUNTS.so_far().damaged else 1)

    with group(folders(tmp_path, 2), 10**8) as nodes, objects.through_cache(nodes[0].make):
        read(PARTS[:600])
        read(PARTS[:600])  # over connections that stay
        forks = [multiprocessing.get_context("fork").Process(target=fork, args=(share,)) for share in range(4)]
        for each in forks:
            each.start()
        for each in forks:
            each.join(60)
        assert [each.exitcode for each in forks] == [0] * 4
        bucket.read.clear()
        read(PARTS)
        assert not bucket.read


@pytest.mark.parametrize("owner", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_entry_is_read_again_and_replaced(tmp_path: Path, owner: int) -> None:
    with group(folders(tmp_path, 2), 10**8) as nodes:
        epoch(nodes, Bucket(), 0, PARTS[:240])
    damaged = next(iter(sorted(folders(tmp_path, 2)[owner].glob("s3-bucket.unversioned/*/*"))))
    good = damaged.read_bytes()
    for bad in (good[:-1], b"", good[:100] + b"?" + good[101:]):
        damaged.write_bytes(bad)
        bucket = Bucket()
        before = COUNTS.so_far().damaged
        with group(folders(tmp_path, 2), 10**8) as nodes:
            epoch(nodes[:1], bucket, 1, PARTS[:240])
        assert len(bucket.read) == COUNTS.so_far().damaged - before == 1
        assert damaged.read_bytes() == good


def test_a_full_disk_and_a_counter_left_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", kilobytes=300) as disk:
        bucket = Bucket()
        with group([disk.path / "cache"], 10**8) as nodes:
            epoch(nodes, bucket, 0)
            epoch(nodes, bucket, 1)
            held = SAMPLES - len(bucket.read[SAMPLES:])
            assert 0 < held < SAMPLES
            os.pwrite(os.open(disk.path / "cache/used", os.O_RDWR), b"\1" * 8, 0)
            assert nodes[0].entries.count() == {"s3-bucket.unversioned": held * (BYTES + END_BYTES)}
            assert nodes[0].entries.used == held * (BYTES + END_BYTES)
        assert sum("cannot be written: No space left" in line for line in caplog.messages) == 1


def test_entries_are_counted_beside_other_files_and_while_some_are_renamed(tmp_path: Path) -> None:
    with group([tmp_path], 10**8) as nodes:
        epoch(nodes, Bucket(), 0)
        settle(nodes)
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "1.jpg").write_bytes(bytes(1000))
        next(tmp_path.glob("s3-bucket.unversioned/*")).joinpath("renamed").symlink_to("nowhere")
        assert nodes[0].entries.count() == {"s3-bucket.unversioned": SAMPLES * (BYTES + END_BYTES), "photos": 0}


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 16])
def test_a_node_without_an_id_gets_one_that_stays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "node").write_bytes(content)
    ids = [Entries(CacheOption(str(tmp_path), 10**8)).node for _ in range(2)]
    assert ids[0] == ids[1] and len(bytes.fromhex(ids[0])) == 8


def test_entries_are_written_while_others_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer takes room of the counter for many entries at once, which needs the lock."""
    counting, other = (Entries(CacheOption(str(tmp_path), 10**8)) for _ in range(2))
    counting.write("s3-bucket.unversioned", key_of(PARTS[0]), content(PARTS[0]))
    os.pwrite(os.open(tmp_path / "used", os.O_RDWR), b"\1" * 3, 0)  # what a killed process has left
    size, written = cache_entries._size, list[bool]()

    def size_beside_a_writer(path: str, began: float) -> int:
        for part in PARTS[1:3] if not written else ():
            other.write("s3-bucket.unversioned", key_of(part), content(part))
            path_of = cache_entries.entry_path(str(tmp_path), "s3-bucket.unversioned", key_of(part))
            written.append(Path(path_of).is_file())
            os.utime(path_of, (began + 1, began + 1))  # as the clocks of some disks are coarse
        return size(path, began)

    monkeypatch.setattr(cache_entries, "_size", size_beside_a_writer)
    assert counting.count() == {"s3-bucket.unversioned": BYTES + HASH_BYTES} and written == [True, True]
    taken = other.limit >> 12
    assert counting.used == BYTES + HASH_BYTES + taken


def test_a_connection_that_has_ended_is_made_again(tmp_path: Path) -> None:
    token = secrets.token_bytes(16)
    node = Node(tmp_path, 10**8, token)
    peers = Peers({"a": [("127.0.0.1", node.port)]}, token)
    try:
        node.entries.write("s3-bucket.unversioned", key_of(PARTS[0]), content(PARTS[0]))
        for _ in range(2):
            found = peers.get("a", "s3-bucket.unversioned", key_of(PARTS[0]))
            assert found is not None and bytes(found[:BYTES]) == bytes(content(PARTS[0]))
            (idle,) = peers._idle["127.0.0.1", node.port]
            idle.shutdown(socket.SHUT_RDWR)
        peers.put("a", "s3-bucket.unversioned", key_of(PARTS[1]), bytes(END_BYTES))
        assert "a" in peers
    finally:
        peers.close()
        node.server.close()


def test_who_does_not_know_the_token_gets_nothing(tmp_path: Path) -> None:
    with group(folders(tmp_path, 1), 10**8) as (node,):
        epoch([node], Bucket(), 0)
        for token in (secrets.token_bytes(16), b"short"):
            peers = Peers({"a": [("127.0.0.1", node.port)]}, token)
            assert peers.get("a", "s3-bucket.unversioned", key_of(PARTS[0])) is None
            peers.close()


def test_a_batch_may_come_from_several_buckets(tmp_path: Path) -> None:
    parts = [ObjectPart(f"s3://{bucket}/{number}.jpg") for number in range(40) for bucket in ("one", "two")]
    bucket = Bucket()
    before = COUNTS.so_far()
    for seed in range(2):
        with group(folders(tmp_path, 2), 10**8) as nodes:
            epoch(nodes, bucket, seed, parts)
    assert sorted(bucket.read) == sorted(parts)
    assert COUNTS.so_far().damaged == before.damaged and COUNTS.so_far().peer_hits > before.peer_hits


def test_parts_of_one_object_are_different_entries(tmp_path: Path) -> None:
    parts = [ObjectPart("s3://bucket/a.tar", offset, 10, 1000) for offset in (0, 10, 20)]

    def read(part: ObjectPart) -> tuple[memoryview, int]:
        asked.append(part)
        return memoryview(bytes([part.offset]) * 10), 7

    asked: list[ObjectPart] = []
    with group(folders(tmp_path, 1), 10**8) as (node,):
        for _ in range(2):
            found = [bytes(node.cache.read(part, read)) for part in parts]
            assert found == [b"\0" * 10, b"\n" * 10, b"\x14" * 10]
            settle([node])
    assert asked == parts


@pytest.mark.parametrize(
    ("text", "size"),
    [("/mnt/cache", None), ("/mnt/cache:500G", 500 * 10**9), ("/mnt/cache:1.5tb", 1500 * 10**9), ("/m:12", 12)],
)
def test_the_option(text: str, size: int | None) -> None:
    assert CacheOption.parse(text) == (text.partition(":")[0], size)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/mnt/cache:full", "DIR:SIZE such as 500G"),
        ("s3://bucket/cache", "not a folder of a node a local disk"),
        ("/mnt/cache:0", "no room above 0"),
        ("", "not a folder"),
    ],
)
def test_options_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        CacheOption.parse(text)
