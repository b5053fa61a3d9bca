"""Sends a node's cached objects to other nodes, and takes copies from them: a child process, and its clients.

It has no part in training, so that it does not take the interpreter of a rank, and ends with its parent. Whoever does
not know the token of the worker group is refused; nothing is encrypted, as between the ranks themselves.
"""

import hmac
import logging
import os
import socket
import socketserver
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from raydali.data.read.node_cache.cache_entries import KEY_BYTES, CacheOption, Entries, checked, entry_path
from raydali.host.child import received

_HEAD = struct.Struct("<cHI")  # what is asked for, the length of the bucket's name, the length of what follows it
_LENGTH = struct.Struct("<q")
_TAKEN = b"."
_SECONDS = 10.0
"""How long a node may take to answer; then it counts as away for AWAY_SECONDS."""
AWAY_SECONDS = 30.0
_MOST = 1 << 31

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Peers:
    """Connections to the servers of other nodes.

    Args:
        servers: host and port of each server of a node, by the node's id.
        token: of the worker group.
    """

    def __init__(self, servers: Mapping[str, Sequence[tuple[str, int]]], token: bytes) -> None:
        self._servers, self._token = {node: [*of_node] for node, of_node in servers.items()}, token
        self._idle = defaultdict[tuple[str, int], list[socket.socket]](list)
        self._away: dict[str, float] = {}
        self._lock = threading.Lock()

    def __contains__(self, node: str) -> bool:
        """Return whether a node has a server, and has answered lately."""
        return node in self._servers and time.monotonic() >= self._away.get(node, 0.0)

    def get(self, node: str, bucket: str, key: bytes) -> memoryview | None:
        """Return an entry with its hash; None if the node lacks it, or does not answer."""

        def ask(connection: socket.socket) -> memoryview | None:
            name = bucket.encode()
            connection.sendall(_HEAD.pack(b"G", len(name), KEY_BYTES) + name + key)
            (length,) = _LENGTH.unpack(received(connection, _LENGTH.size))
            return None if length < 0 else received(connection, length)

        return self._ask(node, key, ask)

    def put(self, node: str, bucket: str, key: bytes, raw: bytes) -> None:
        """Send an entry with its hash to its owner, which keeps it if it has room."""

        def send(connection: socket.socket) -> None:
            name = bucket.encode()
            connection.sendall(_HEAD.pack(b"P", len(name), KEY_BYTES + len(raw)) + name + key)
            connection.sendall(raw)
            received(connection, len(_TAKEN))

        self._ask(node, key, send)

    def _ask(self, node: str, key: bytes, ask: Callable[[socket.socket], T]) -> T | None:
        """Return what is answered on a connection to a server of the node; None if it does not answer.

        An idle connection may have ended without notice, in a firewall or at a restart: a new one tells.
        """
        server = self._servers[node][key[-1] % len(self._servers[node])]
        idle, connection = self._idle[server], None
        try:
            with suppress(IndexError):
                connection = idle.pop()
            was_idle = connection is not None
            if connection is None:
                connection = socket.create_connection(server, _SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(self._token)
            answer = ask(connection)
        except OSError as error:
            if connection is not None:
                connection.close()
            self.close(server)
            if was_idle and not isinstance(error, TimeoutError):
                return self._ask(node, key, ask)
            with self._lock:
                is_known, self._away[node] = node in self._away, time.monotonic() + AWAY_SECONDS
            if not is_known:
                text = "the cache of node %s does not answer: its part is read from the bucket (%s)"
                _log.warning(text, server[0], error.strerror or error)
            return None
        idle.append(connection)
        return answer

    def close(self, *servers: tuple[str, int]) -> None:
        """End the connections that are idle, to these servers or to all."""
        for server in servers or [*self._idle]:
            with suppress(IndexError):
                while True:
                    self._idle[server].pop().close()


# Code of the server's process.


class _Handler(socketserver.BaseRequestHandler):
    server: "_Listener"

    def handle(self) -> None:
        """Answer what a connection asks for, until its end."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            if not hmac.compare_digest(bytes(received(self.request, len(self.server.token))), self.server.token):
                return
            while True:
                asked, of_name, length = _HEAD.unpack(received(self.request, _HEAD.size))
                bucket = bytes(received(self.request, of_name)).decode()
                if "/" in bucket or bucket.startswith(".") or length > _MOST:
                    return
                key = bytes(received(self.request, KEY_BYTES))
                if asked == b"G":
                    self._send(entry_path(self.server.folder, bucket, key))
                else:
                    content = checked(key, received(self.request, length - KEY_BYTES))
                    entries = self.server.entries
                    if content is not None and entries.read(bucket, key) is None:  # this one may be damaged
                        entries.write(bucket, key, content)
                    self.request.sendall(_TAKEN)

    def _send(self, path: str) -> None:
        try:
            file = open(path, "rb")  # noqa: SIM115 - closed below
        except OSError:
            self.request.sendall(_LENGTH.pack(-1))
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            self.request.sendall(_LENGTH.pack(size), socket.MSG_MORE)
            if self.request.sendfile(file) != size:
                raise ConnectionError("the entry ended")


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, folder: str, limit: int, address: str, token: bytes) -> None:
        self.folder, self.token, self.entries = folder, token, Entries(CacheOption(folder, limit))
        super().__init__((address, 0), _Handler)


def serve(folder: str, limit: int, address: str, token: bytes) -> int:
    """Serve a folder from threads of this process, a `Child`; return the port."""
    server = _Listener(folder, limit, address, token)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])
