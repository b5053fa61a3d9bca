"""Sends a node's cached objects to other nodes, and takes copies from them: a process of its own, and its clients.

    python -m raydali.data.sources.cache_peers FOLDER LIMIT ADDRESS     the token on standard input; prints its port

It has no part in training, so that it does not take the interpreter of a rank, and ends with its parent. Whoever does
not know the token of the worker group is refused; nothing is encrypted, as between the ranks themselves.
"""

import contextlib
import hmac
import logging
import os
import queue
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from raydali.data.sources.cache_entries import KEY_BYTES, CacheOption, Entries, checked, entry_path

_HEAD = struct.Struct("<cHI")  # what is asked for, the length of the bucket's name, the length of what follows it
_LENGTH = struct.Struct("<q")
_TAKEN = b"."
_SECONDS = 10.0
"""How long a node may take to answer; then it counts as away for AWAY_SECONDS."""
AWAY_SECONDS = 30.0
_MOST = 1 << 31

_log = logging.getLogger(__name__)


class PeerError(OSError):
    """Another node does not answer."""


def received(connection: socket.socket, length: int) -> bytearray:
    """Return so many bytes.

    Raises:
        PeerError: the connection ended before.
    """
    content = bytearray(length)
    view = memoryview(content)
    while view:
        if not (count := connection.recv_into(view)):
            raise PeerError("the connection ended")
        view = view[count:]
    return content


class Server:
    """The process that serves a folder. Its parent ends it by `close`, or by its own end."""

    def __init__(self, folder: str, limit: int, address: str, token: bytes) -> None:
        command = [sys.executable, "-P", "-m", "raydali.data.sources.cache_peers", folder, str(limit), address]
        path = os.pathsep.join(str(Path(each).absolute()) for each in sys.path)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
        )
        assert self._process.stdin is not None
        self._process.stdin.write(token)
        self._process.stdin.flush()

    def port(self) -> int:
        """Return the port once the process listens; 0 if it has ended."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline() or 0)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


class Peers:
    """Connections to the servers of other nodes.

    Args:
        servers: host and port of each server of a node, by the node's id.
        token: of the worker group.
    """

    def __init__(self, servers: Mapping[str, Sequence[tuple[str, int]]], token: bytes) -> None:
        self._servers, self._token = {node: [*of_node] for node, of_node in servers.items()}, token
        self._idle: dict[tuple[str, int], queue.LifoQueue[socket.socket]] = {
            server: queue.LifoQueue() for of_node in self._servers.values() for server in of_node
        }
        self._away: dict[str, float] = {}
        self._lock = threading.Lock()

    def __contains__(self, node: str) -> bool:
        """Return whether a node has a server, and has answered lately."""
        return node in self._servers and time.monotonic() >= self._away.get(node, 0.0)

    def get(self, node: str, wanted: Sequence[tuple[str, bytes]]) -> list[memoryview | None]:
        """Return entries with their hashes; None for those that the node lacks, or all if it does not answer."""
        answers: dict[tuple[str, bytes], memoryview | None] = {}
        server = self._server(node, wanted[0][1])
        with self._answering(node, server), self._connection(server) as connection:
            for bucket in dict.fromkeys(bucket for bucket, _ in wanted):
                keys, name = [key for of, key in wanted if of == bucket], bucket.encode()
                connection.sendall(_HEAD.pack(b"G", len(name), len(keys) * KEY_BYTES) + name + b"".join(keys))
                for key in keys:
                    (length,) = _LENGTH.unpack(received(connection, _LENGTH.size))
                    answers[bucket, key] = None if length < 0 else memoryview(received(connection, length))
        return [answers.get(each) for each in wanted]

    def put(self, node: str, bucket: str, key: bytes, raw: bytes) -> None:
        """Send an entry with its hash to its owner, which keeps it if it has room."""
        server = self._server(node, key)
        with self._answering(node, server), self._connection(server) as connection:
            name = bucket.encode()
            connection.sendall(_HEAD.pack(b"P", len(name), KEY_BYTES + len(raw)) + name + key)
            connection.sendall(raw)
            received(connection, len(_TAKEN))

    def _server(self, node: str, key: bytes) -> tuple[str, int]:
        return self._servers[node][key[-1] % len(self._servers[node])]

    @contextlib.contextmanager
    def _connection(self, server: tuple[str, int]) -> Iterator[socket.socket]:
        try:
            connection, is_new = self._idle[server].get_nowait(), False
        except queue.Empty:
            connection, is_new = socket.create_connection(server, _SECONDS), True
        try:
            if is_new:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(self._token)
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle[server].put(connection)

    @contextlib.contextmanager
    def _answering(self, node: str, server: tuple[str, int]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._close(server)
            with self._lock:
                is_known, self._away[node] = node in self._away, time.monotonic() + AWAY_SECONDS
            if not is_known:
                text = "the cache of node %s does not answer: its part is read from the bucket (%s)"
                _log.warning(text, server[0], error.strerror or error)

    def close(self) -> None:
        """End all connections."""
        for server in self._idle:
            self._close(server)

    def _close(self, server: tuple[str, int]) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle[server].get_nowait().close()


# Code of the server's process.


class _Handler(socketserver.BaseRequestHandler):
    server: "_Listener"

    def handle(self) -> None:
        """Answer what a connection asks for, until its end."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            if not hmac.compare_digest(bytes(received(self.request, len(self.server.token))), self.server.token):
                return
            while True:
                asked, of_name, length = _HEAD.unpack(received(self.request, _HEAD.size))
                bucket = received(self.request, of_name).decode()
                if "/" in bucket or bucket.startswith(".") or length > _MOST:
                    return
                if asked == b"G":
                    keys = received(self.request, length)
                    for place in range(0, length, KEY_BYTES):
                        self._send(entry_path(self.server.folder, bucket, bytes(keys[place : place + KEY_BYTES])))
                else:
                    key = bytes(received(self.request, KEY_BYTES))
                    raw = memoryview(received(self.request, length - KEY_BYTES))
                    self.server.keep(bucket, key, raw)
                    self.request.sendall(_TAKEN)

    def _send(self, path: str) -> None:
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            self.request.sendall(_LENGTH.pack(-1))
            return
        try:
            size, sent = os.fstat(file).st_size, 0
            self.request.sendall(_LENGTH.pack(size), socket.MSG_MORE)
            while sent < size:
                if not (count := os.sendfile(self.request.fileno(), file, sent, size - sent)):
                    raise PeerError("the entry ended")
                sent += count
        finally:
            os.close(file)


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, folder: str, limit: int, address: str, token: bytes) -> None:
        self.folder, self.token, self._entries = folder, token, Entries(CacheOption(folder, limit))
        super().__init__((address, 0), _Handler)

    def keep(self, bucket: str, key: bytes, raw: memoryview) -> None:
        """Keep an entry that another node has sent, if it is whole and there is room."""
        content = checked(key, raw)
        if content is not None and self._entries.read(bucket, key) is None:  # this one may be damaged
            self._entries.write(bucket, key, content)


def main() -> None:
    """Serve until the parent ends."""
    folder, limit, address = sys.argv[1:]
    with _Listener(folder, int(limit), address, sys.stdin.buffer.read(KEY_BYTES)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.buffer.read()  # until the parent's end


if __name__ == "__main__":
    main()
