"""A metadata server on this machine that answers as those of EC2 and Compute Engine do."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class MetadataServer(ThreadingHTTPServer):
    """Answers at `url` from then on.

    Attributes:
        failures: how many of the next requests are refused with 503.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.change = threading.Condition()
        self.failures = 0
        self.ends: float | None = None

    def announce(self, ends: float) -> None:
        """From now on the machine is about to be taken away, at that time (seconds since 1970)."""
        with self.change:
            self.ends = ends
            self.change.notify_all()


class _Handler(BaseHTTPRequestHandler):
    server: MetadataServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_PUT(self) -> None:
        if self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
            self._reply(200, "a token")
        else:
            self._reply(400)

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != "a token":
                self._reply(401)
            elif self.server.ends is None:
                self._reply(404)
            else:
                ends = datetime.fromtimestamp(self.server.ends, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                self._reply(200, json.dumps({"action": "terminate", "time": ends}))
        elif path == "/computeMetadata/v1/instance/preempted":
            if self.headers["Metadata-Flavor"] != "Google":
                self._reply(403)
                return
            if query.get("wait_for_change") == ["true"]:
                with self.server.change:
                    changed = lambda: self._etag() not in query["last_etag"]  # noqa: E731
                    self.server.change.wait_for(changed, float(query["timeout_sec"][0]))
            self._reply(200, "FALSE" if self.server.ends is None else "TRUE")
        else:
            self._reply(404)

    def _etag(self) -> str:
        return "1a" if self.server.ends is None else "2b"

    def _reply(self, status: int, body: str = "") -> None:
        with self.server.change:
            if self.server.failures:
                self.server.failures -= 1
                status, body = 503, ""
            self.send_response(status)
            self.send_header("ETag", self._etag())
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())


@contextmanager
def metadata_server() -> Iterator[MetadataServer]:
    """One that ends with the block."""
    server = MetadataServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
