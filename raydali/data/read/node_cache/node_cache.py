"""The cache of a node: objects of buckets on its disk, which no node reads from the bucket a second time.

    this node's entry --> the owner's entry --> an owner of earlier --> the bucket, and a copy to the owner

The ids of all nodes and a part's key name its owner (rendezvous hashing), so that nodes share out the data, and a node
that joins or leaves moves only its share. As each epoch reads each sample once, no policy hits more often than the
capacity allows; so an entry stays until its folder is removed, and what finds no room is read from the bucket.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b

import numpy as np

from raydali.data.read.node_cache.cache_entries import KEY_BYTES, CacheOption, Entries, checked, hash_of
from raydali.data.read.node_cache.cache_peers import Peers
from raydali.data.read.read_counts import COUNTS
from raydali.data.read.storage import ObjectPart
from raydali.data.stream.counter_rng import keyed

TAG_BYTES = 8
"""At the end of an entry's content: the number for its version that `fetch` has returned."""
_COPIES_AHEAD = 64
"""Copies that wait for their way to the owner or the disk; further ones are made before the reader goes on."""


class NodeCache:
    """Reads objects through the entries of all nodes; see the module.

    Args:
        own: the entries of this node; None if it can have none, and only reads the entries of other nodes.
        servers, token: of the other nodes, see `Peers`.
        nodes: the ids of all nodes.
        earlier: the nodes of earlier worker groups, which may have what its owner lacks now.
    """

    def __init__(
        self,
        own: CacheOption | None,
        servers: Mapping[str, Sequence[tuple[str, int]]],
        token: bytes,
        nodes: Sequence[str],
        earlier: Iterable[Sequence[str]],
    ) -> None:
        self._entries, self._peers = None if own is None else Entries(own), Peers(servers, token)
        self._me = "" if self._entries is None else self._entries.node
        self._groups = [tuple(nodes), *sorted({*map(tuple, earlier)} - {tuple(nodes)})]
        self._copies = ThreadPoolExecutor(2, thread_name_prefix="cache copies")
        self._waiting = threading.Semaphore(_COPIES_AHEAD)

    def read(self, part: ObjectPart, fetch: Callable[[ObjectPart], tuple[memoryview, int]]) -> memoryview:
        """Return the content of a part; `fetch` reads it from its bucket, with a number for its version."""
        key, bucket = key_of(part), bucket_of(part)
        if self._entries is not None and (entry := self._entries.read(bucket, key)) is not None:
            COUNTS.add(hits=1)
            return entry[:-TAG_BYTES]
        owners = [owner_of(key, group) for group in self._groups]
        for node in dict.fromkeys(owners):  # the present owner, and then earlier owners
            raw = self._peers.get(node, bucket, key) if node != self._me and node in self._peers else None
            if raw is not None and (entry := checked(key, raw)) is not None:
                COUNTS.add(peer_hits=1)
                return entry[:-TAG_BYTES]
        content, tag = fetch(part)
        tagged = b"".join((content, tag.to_bytes(TAG_BYTES, "little", signed=True)))
        self._keep(owners[0], bucket, key, memoryview(tagged))
        return content

    def _keep(self, owner: str, bucket: str, key: bytes, content: memoryview) -> None:
        if owner == self._me and self._entries is not None:
            copy = partial(self._entries.write, bucket, key, content)
        elif owner in self._peers:
            copy = partial(self._peers.put, owner, bucket, key, b"".join((content, hash_of(key, content))))
        else:
            return
        if self._waiting.acquire(blocking=False):
            self._copies.submit(copy).add_done_callback(lambda _: self._waiting.release())
        else:
            copy()

    def close(self) -> None:
        """Make the copies that wait, and end connections."""
        self._copies.shutdown()
        self._peers.close()


def key_of(part: ObjectPart) -> bytes:
    """Return the key of an entry: what is read, and the size and the ETag of the object when it was indexed."""
    return blake2b("\0".join(map(str, part)).encode(errors="surrogateescape"), digest_size=KEY_BYTES).digest()


def bucket_of(part: ObjectPart) -> str:
    """Return the name of the folder for a part's entry: those whose keys have no version are apart."""
    scheme, _, path = part.uri.partition("://")
    return f"{scheme}-{path.partition('/')[0]}{'.versioned' if part.tag else '.unversioned'}"


def owner_of(key: bytes, nodes: Sequence[str]) -> str:
    """Return the owner of a key: the node whose hash with the key is the largest, or "" if there are no nodes."""
    if len(nodes) <= 1:
        return "".join(nodes)
    ids = np.array([int(node, 16) for node in nodes], np.uint64)
    return nodes[int(keyed(int.from_bytes(key[:8], "little"), ids).argmax())]
