"""Object stores on this machine: moto for S3, and as much of Google's storage as is needed."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

PutObjects = Callable[[str, dict[str, bytes]], None]


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """One server for all tests, since DALI keeps its connection to the first that it was told of."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> PutObjects:
    """Makes a bucket with these objects on a server of this machine."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    def put(bucket: str, objects: dict[str, bytes]) -> None:
        client = boto3.client("s3")
        client.create_bucket(Bucket=bucket)
        for key, body in objects.items():
            client.put_object(Bucket=bucket, Key=key, Body=body)

    return put


class FlakyS3:
    """A server for S3 with the bucket `bucket` that can be told to fail, and be stopped and started again.

    A GET of /_busy/SECONDS, from any process, makes it busy for so long.

    Args:
        address: at which it listens.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.busy = False
        """Whether it answers every call with 503; how many there were, and how many bytes it sent in answer to GET."""
        self.calls = self.refused = self.sent = 0
        self.reads = Counter[str]()
        """How often it sent each object in answer to GET, by its key."""
        self.thinks = 0.0
        """Seconds after which each answer begins."""
        self._busy_until, self._lock = 0.0, threading.Lock()
        self._address, self._port = address, 0
        self.start()

    def start(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, *_: object) -> None:
                pass

        application = DomainDispatcherApplication(create_backend_app)

        def answer(environ: Any, start_response: Any) -> Any:
            self.calls += 1
            time.sleep(self.thinks)
            if environ["PATH_INFO"].startswith("/_busy/"):
                self._busy_until = time.monotonic() + float(environ["PATH_INFO"].rpartition("/")[2])
                start_response("200 OK", [])
                return []
            if self.busy or time.monotonic() < self._busy_until:
                self.refused += 1
                start_response("503 Slow Down", [("Content-Type", "application/xml")])
                return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]

            def counted(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
                if environ["REQUEST_METHOD"] == "GET":
                    self.sent += int(dict(headers).get("Content-Length", 0))
                    if status.startswith("20") and (key := environ["PATH_INFO"].partition("/bucket/")[2]):
                        with self._lock:
                            self.reads[key] += 1
                return start_response(status, headers, *rest)

            return application(environ, counted)

        self._server = make_server(self._address, self._port, answer, threaded=True, request_handler=Quiet)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections from now on; the objects stay."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://{self._address}:{self._port}"

    @property
    def variables(self) -> dict[str, str]:
        """What clients find in the environment."""
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        return {"AWS_ENDPOINT_URL": self.url} | keys


@pytest.fixture
def flaky_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyS3]:
    import boto3

    server = FlakyS3()
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    bucket = boto3.resource("s3").create_bucket(Bucket="bucket")
    yield server
    server.busy, server.thinks = False, 0.0
    bucket.objects.all().delete()
    bucket.delete()
    server.stop()


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # with the default of 5, more callers at once than that wait for a second


@contextmanager
def serve(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The objects of gs://bucket on a server that knows three calls of Google's JSON API: stat, list and read."""
    objects: dict[str, bytes] = {}

    def describe(key: str) -> dict[str, str]:
        return {"kind": "storage#object", "bucket": "bucket", "name": key, "size": str(len(objects[key]))}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            _, found, key = url.path.partition("/b/bucket/o")
            key = unquote(key).removeprefix("/")
            if found and not key:
                items = [describe(key) for key in sorted(objects) if key.startswith(query.get("prefix", [""])[0])]
                body = json.dumps({"kind": "storage#objects", "items": items}).encode()
            elif found and key in objects:
                body = objects[key] if "alt" in query else json.dumps(describe(key)).encode()
            else:
                self.send_response(404)
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serve(Handler) as url:
        monkeypatch.setenv("DALI_GCS_ENDPOINT_URL", url)
        monkeypatch.setenv("DALI_GCS_ANONYMOUS", "1")
        yield objects
