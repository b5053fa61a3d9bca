"""An S3 server as fast as the disk, to measure with: nginx sends objects, and this process lists them.

    python -m tests.support.fast_s3 FOLDER [PORT [PROCESSES]]

Each folder in FOLDER is a bucket. Ranges, HEAD and ListObjectsV2 are answered; nothing is signed, and nothing can be
written. nginx is Debian's package nginx-light; moto's server, which tests use, is Python, and sends 500 objects/s.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit
from xml.sax.saxutils import escape

from tests.support.cluster import free_ports

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_PAGE = 1000  # keys of an answer, as of S3
_CONFIG = """
worker_processes {processes}; worker_rlimit_nofile 200000; daemon off; user {user};
pid {folder}/pid; error_log {folder}/errors warn;
events {{ worker_connections 4096; }}
http {{
  log_format bytes '$status $body_bytes_sent'; access_log {folder}/sent bytes buffer=4k flush=100ms;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  sendfile on; tcp_nodelay on; keepalive_requests 1000000;
  limit_req_zone $server_name zone=all:1m rate={rate}r/s;
  server {{
    listen {port} backlog=4096; root {root}; server_name all; {limit}
    location / {{ if ($args ~ "list-type|location|delimiter") {{ proxy_pass http://127.0.0.1:{lister}; }} }}
    location ~ ^/[^/]+/?$ {{ proxy_pass http://127.0.0.1:{lister}; }}
  }}
}}
"""


@dataclass
class FastS3:
    """A server that runs.

    Attributes:
        url: for AWS_ENDPOINT_URL.
        pid: the process of nginx, whose children serve.
    """

    url: str
    pid: int
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """What clients find in the environment."""
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        return {"AWS_ENDPOINT_URL": self.url} | keys

    def sent(self) -> tuple[int, int, int]:
        """The number of objects sent, their bytes, and the number of requests refused, as far as they are logged."""
        rows = [line.split() for line in (self.folder / "sent").read_text().splitlines()]
        objects = [int(size) for status, size in rows if status in ("200", "206")]
        return len(objects), sum(objects), sum(status == "503" for status, _ in rows)


@contextmanager
def fast_s3(
    root: str | Path, *, port: int | None = None, processes: int = 2, requests_per_second: int | None = None
) -> Iterator[FastS3]:
    """Serve the folders of a root as buckets; more requests than given are refused with 503, as S3 does."""
    assert NGINX is not None, "install Debian's nginx-light"
    own, lister_port = free_ports(2)
    port = port or own
    lister = ThreadingHTTPServer(("127.0.0.1", lister_port), _lister(Path(root)))
    threading.Thread(target=lister.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="fast-s3.") as folder:
        limit = "" if requests_per_second is None else f"limit_req zone=all burst={requests_per_second} nodelay;"
        facts = {"processes": processes, "folder": folder, "root": Path(root).absolute(), "port": port, "limit": limit}
        user = "root" if os.geteuid() == 0 else "nobody"
        facts |= {"lister": lister_port, "rate": requests_per_second or 1, "user": user}
        config = Path(folder, "nginx.conf")
        config.write_text(_CONFIG.format(**facts))
        process = subprocess.Popen([NGINX, "-c", str(config), "-e", f"{folder}/errors"])
        try:
            while not Path(folder, "pid").exists():
                assert process.poll() is None, Path(folder, "errors").read_text()
            yield FastS3(f"http://127.0.0.1:{port}", process.pid, Path(folder))
        finally:
            process.terminate()
            process.wait()
            lister.shutdown()


def _lister(root: Path) -> type[BaseHTTPRequestHandler]:
    keys: dict[str, list[str]] = {}

    class Lister(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(b"")

        def do_GET(self) -> None:
            place = urlsplit(self.path)
            bucket = place.path.strip("/")
            if bucket not in keys:
                keys[bucket] = sorted(
                    str(Path(folder, name).relative_to(root / bucket))
                    for folder, _, names in os.walk(root / bucket)
                    for name in names
                )
            self._answer(_listed(bucket, keys[bucket], root, parse_qs(place.query, keep_blank_values=True)))

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Lister


def _listed(bucket: str, keys: list[str], root: Path, query: dict[str, list[str]]) -> bytes:
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    after = query.get("continuation-token", query.get("start-after", [""]))[0]
    page = int(query.get("max-keys", [str(_PAGE)])[0])
    rows: list[str] = []
    folders: list[str] = []
    last, truncated = "", "false"
    for key in keys[bisect_right(keys, after) :]:
        if not key.startswith(prefix):
            continue
        folder, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        name = prefix + folder + delimiter if found else key
        if found and (name == last or after.startswith(name)):
            continue
        if len(rows) + len(folders) == page:
            truncated = "true"
            break
        last = name
        if found:
            folders.append(f"<CommonPrefixes><Prefix>{_text(name)}</Prefix></CommonPrefixes>")
        else:
            size = (root / bucket / key).stat().st_size
            row = f"<Key>{_text(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            rows.append(f"<Contents>{row}<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>")
    token = f"<NextContinuationToken>{_text(last)}</NextContinuationToken>" if truncated == "true" else ""
    head = f"<Name>{bucket}</Name><Prefix>{_text(prefix)}</Prefix><KeyCount>{len(rows) + len(folders)}</KeyCount>"
    head += f"<MaxKeys>{page}</MaxKeys><IsTruncated>{truncated}</IsTruncated>{token}"
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    return f'<ListBucketResult xmlns="{space}">{head}{"".join(rows + folders)}</ListBucketResult>'.encode()


def _text(name: str) -> str:
    return escape(quote(name, safe="/")) if any(ord(letter) < 32 for letter in name) else escape(name)


if __name__ == "__main__":
    at, *rest = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # nginx is to end with this process
    with fast_s3(at, **dict(zip(("port", "processes"), map(int, rest), strict=False))) as server:
        print(server.url, server.pid, flush=True)
        threading.Event().wait()
