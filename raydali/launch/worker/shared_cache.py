"""Joins the caches of the nodes (`--cache`) of a worker group: each rank reads through them from then on."""

import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import compress

import numpy as np

from raydali.data.index.source import Source
from raydali.data.read import objects, storage
from raydali.data.read.node_cache.cache_entries import CacheOption, Entries
from raydali.data.read.node_cache.cache_peers import serve
from raydali.data.read.node_cache.node_cache import TAG_BYTES, NodeCache, bucket_of, key_of
from raydali.data.read.storage import CONNECTIONS, ObjectPart, not_permitted
from raydali.host.child import Child, ChildDiedError
from raydali.run.data_contents import FILES, indexes_of, sample
from raydali.text import GIGABYTE, summarize
from raydali.training.worker import Worker

_CROWDED = 0.1
"""From this share of the size on, entries of other data are worth a warning once there is no room."""


@contextmanager
def shared_cache(
    option: str | None, worker: Worker, address: str, data: Sequence[Source], warn: Callable[[str], None]
) -> Iterator[None]:
    """Read objects through the cache of all nodes in the `with` block. All ranks must enter it.

    A folder that cannot be used is warned of; its node then reads what other nodes have, and the bucket.

    Args:
        option: `DIR[:SIZE]`; None for no cache.
        worker: this rank.
        address: of this node, at which other nodes reach it.
        data: the run's samples. Of those without an ETag in their index a sample is compared with what is in the cache.
        warn: shows a warning.
    """
    if option is None:
        yield
        return
    token = bytes.fromhex(worker.from_first(secrets.token_hex(16)))
    entries: Entries | None = None
    server, port, fault = Child("cache server"), 0, ""
    try:
        entries = Entries(CacheOption.parse(option))
        port = server.call(serve, entries.folder, entries.limit, address, token)
    except OSError as error:
        fault = not_permitted(error) or error.strerror or str(error)
    except ChildDiedError as died:
        fault = str(died)
    earlier = [] if entries is None else entries.groups()
    members = worker.exchange([entries.node if entries else "", address, port, earlier, worker.node if fault else ""])
    if fault and [at_fault for *_, at_fault in members].index(worker.node) == worker.rank:
        at = f"--cache {option} cannot be used on node {worker.node}: {fault}"
        warn(f"{at}; give a folder that can be written. What no other node has is read from the bucket")
    nodes = sorted({node for node, *_ in members} - {""})
    servers: dict[str, list[tuple[str, int]]] = {}
    for node, host, at_port, *_ in members:
        if at_port and (entries is None or node != entries.node):
            servers.setdefault(node, []).append((host, at_port))
    first = [node for node, *_ in members].index(entries.node if entries else "") == worker.rank
    indexes = [files for source in data for files in indexes_of(source)]
    parts = [part for files in indexes for part in files.parts(sample(FILES, np.arange(len(files))))]
    parts = [part for part in parts if "://" in part.uri]
    changed = _changed(entries, parts) if entries is not None and first else []
    changed = sorted({bucket for of_node in worker.exchange(changed) for bucket in of_node})
    if entries is not None and first:
        entries.groups(nodes)
        for bucket in changed:
            shutil.rmtree(f"{entries.folder}/{bucket}", ignore_errors=True)
        threading.Thread(target=_count, args=(entries, {*map(bucket_of, parts)}, warn), daemon=True).start()
    if changed and worker.rank == 0:
        warn(f"--cache: objects of {summarize(changed)} have changed since they were read: all are read again")
    worker.barrier()
    groups = [group for *_, earlier, _ in members for group in earlier]

    own = None if entries is None else CacheOption(entries.folder, entries.limit)
    try:
        with objects.through_cache(partial(NodeCache, own, servers, token, nodes, groups)):
            yield
    finally:
        server.close()


def _changed(entries: Entries, parts: Sequence[ObjectPart]) -> list[str]:
    """Return names of buckets with objects that are not what this node's entries without a version have of them."""

    def has_changed(part: ObjectPart) -> bool:
        if part.tag or (held := entries.read(bucket_of(part), key_of(part))) is None:
            return False
        tag = int.from_bytes(held[-TAG_BYTES:], "little", signed=True)
        size, now = storage.version_of(part.uri)
        return size >= 0 and (size != held.nbytes - TAG_BYTES or now > 0 < tag != now or now < tag < 0)

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        return [*{*map(bucket_of, compress(parts, threads.map(has_changed, parts)))}]


def _count(entries: Entries, ours: set[str], warn: Callable[[str], None]) -> None:
    others = {bucket: size for bucket, size in entries.count().items() if bucket not in ours}
    largest = max(others, key=lambda bucket: others[bucket], default="")
    if largest and others[largest] > _CROWDED * entries.limit and entries.used > (1 - _CROWDED) * entries.limit:
        held = f"{others[largest] / GIGABYTE:.1f} of its {entries.limit / GIGABYTE:.1f} GB are other data"
        warn(f"the cache {entries.folder} is full, and {held}: remove {entries.folder}/{largest} to make room")
