"""The cache of a node: objects of buckets on its disk, which no node reads from the bucket a second time.

    this node's entry --> the owner's entry --> an owner of earlier --> the bucket, and a copy to the owner

The ids of all nodes and a part's key name its owner (rendezvous hashing), so that nodes share out the data, and a node
that joins or leaves moves only its share. As each epoch reads each sample once, no policy hits more often than the
capacity allows; so an entry stays until its folder is removed, and what finds no room is read from the bucket.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b

import numpy as np

from raydali.data.sources.cache_entries import KEY_BYTES, Entries, checked, hash_of
from raydali.data.sources.cache_peers import Peers
from raydali.data.sources.read_counts import COUNTS
from raydali.data.sources.storage import ObjectPart
from raydali.data.stream.counter_rng import keyed

_COPIES_AHEAD = 64
"""Copies that wait for their way to the owner or the disk; further ones are made before the reader goes on."""


class NodeCache:
    """Reads objects through the entries of all nodes; see the module.

    Args:
        entries: of this node; None if it can have none, and only reads those of other nodes.
        peers: the servers of the other nodes, by the nodes' ids.
        earlier: the nodes of earlier worker groups, which may have what its owner lacks now.
    """

    def __init__(
        self, entries: Entries | None, peers: Peers, nodes: Sequence[str], earlier: Iterable[Sequence[str]]
    ) -> None:
        self._entries, self._peers, self._nodes = entries, peers, [*nodes]
        self._me = "" if entries is None else entries.node
        known = {tuple(group) for group in earlier} - {tuple(nodes)}
        self._groups = [self._nodes, *map(list, sorted(known))]
        self._copies = ThreadPoolExecutor(2, thread_name_prefix="cache copies")
        self._waiting = threading.Semaphore(_COPIES_AHEAD)

    def read(self, parts: Sequence[ObjectPart], fetch: Callable[[ObjectPart], memoryview]) -> list[memoryview]:
        """See `storage.ReadsThrough`."""
        keys, buckets = [key_of(part) for part in parts], [bucket_of(part.uri) for part in parts]
        found: dict[int, memoryview] = {}
        if self._entries is not None:
            for place, (bucket, key) in enumerate(zip(buckets, keys, strict=True)):
                if (content := self._entries.read(bucket, key)) is not None:
                    found[place] = content
            COUNTS.add(hits=len(found))
        owners = [owners_of(keys, group) for group in self._groups] if len(found) < len(keys) else []
        asked: dict[int, set[str]] = {place: {self._me} for place in range(len(keys)) if place not in found}
        for of_group in owners:  # the owners of now, and then those of earlier
            questions: dict[str, list[int]] = {}
            for place in asked:
                if place not in found and (node := of_group[place]) not in asked[place] and node in self._peers:
                    asked[place].add(node)
                    questions.setdefault(node, []).append(place)
            for node, places in questions.items():
                answers = self._peers.get(node, [(buckets[place], keys[place]) for place in places])
                for place, raw in zip(places, answers, strict=True):
                    if raw is not None and (content := checked(keys[place], raw)) is not None:
                        found[place] = content
                        COUNTS.add(peer_hits=1)
        for place in asked:
            if place not in found:
                found[place] = content = fetch(parts[place])
                self._keep(owners[0][place], buckets[place], keys[place], content)
        return [found[place] for place in range(len(parts))]

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
    """Return the key of an entry: what is read, and the size of the object when it was indexed."""
    return blake2b("\0".join(map(str, part)).encode(errors="surrogateescape"), digest_size=KEY_BYTES).digest()


def bucket_of(uri: str) -> str:
    """Return the name of the folder for the entries of a bucket."""
    scheme, _, path = uri.partition("://")
    return f"{scheme}-{path.partition('/')[0]}"


def owners_of(keys: Sequence[bytes], nodes: Sequence[str]) -> list[str]:
    """Return the owner of each key: the node whose hash with the key is the largest."""
    if len(nodes) == 1:
        return [nodes[0]] * len(keys)
    if not nodes:
        return [""] * len(keys)
    of_keys = np.array([int.from_bytes(key[:8], "little") for key in keys], np.uint64)
    of_nodes = np.array([int(node, 16) for node in nodes], np.uint64)
    return [nodes[place] for place in keyed(of_keys[:, None], of_nodes[None, :]).argmax(1).tolist()]
