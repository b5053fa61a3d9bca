"""Requests to S3 that are refused, broken or stalled, and answers that no repetition changes."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from raydali.data.index.files import Files
from raydali.data.read import storage
from raydali.data.read.objects import read_objects
from raydali.data.read.read_counts import COUNTS, Counts
from raydali.data.read.reading import is_transient, short
from raydali.data.read.storage import ObjectPart, StoreError
from tests.support.messages import mentioning
from tests.support.object_stores import PutObjects
from tests.support.trees import bytes_of

CONTENT = bytes(range(256)) * 40


class S3:
    """A server whose answers are planned: an HTTP status with a code, or `cut` for a connection that breaks."""

    def __init__(self) -> None:
        self.plan: list[str] = []
        plan = self.plan

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                answer = plan.pop(0) if plan else "200"
                status, _, code = answer.partition(" ")
                body = CONTENT if status in ("200", "cut") else f"<Error><Code>{code}</Code></Error>".encode()
                self.send_response(int(status) if status != "cut" else 200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
                self.end_headers()
                self.wfile.write(body[:100] if status == "cut" else body)
                self.close_connection = status == "cut"

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    s3 = S3()
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.server.server_port}")
    monkeypatch.setattr(storage, "_FIRST_PAUSE", 0.01)
    COUNTS.take()
    yield s3.plan
    s3.server.shutdown()
    s3.server.server_close()


def test_refused_and_broken_requests_are_repeated_and_counted(planned: list[str]) -> None:
    planned += ["503 SlowDown", "cut", "500 InternalError", "429 TooManyRequests"]
    assert storage.read("s3://bucket/a b/c%20d+\u00e9.jpg") == CONTENT
    assert COUNTS.take() == Counts(requests=1, bytes=len(CONTENT), repeated=4)


def test_a_bucket_that_refuses_for_longer_is_an_outage(planned: list[str]) -> None:
    planned += ["503 SlowDown"] * storage._ATTEMPTS
    with pytest.raises(StoreError, match=mentioning("s3://bucket/1.jpg HTTP status 503 SlowDown")) as raised:
        storage.read("s3://bucket/1.jpg")
    assert is_transient(raised.value) and short(raised.value) == "HTTP status 503"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("403 AccessDenied", "HTTP status 403 AccessDenied"),
        ("400 ExpiredToken", "HTTP status 400 ExpiredToken credentials have expired give new ones"),
        ("403 RequestTimeTooSkewed", "HTTP status 403 the clock of this machine is wrong"),
        ("301 PermanentRedirect", "HTTP status 301 set AWS_REGION"),
    ],
)
def test_what_no_repetition_changes_is_said_at_once(planned: list[str], answer: str, words: str) -> None:
    planned += [answer]
    with pytest.raises(StoreError, match=mentioning(words)) as raised:
        storage.read("s3://bucket/1.jpg")
    assert not planned and COUNTS.take() == Counts()
    assert not is_transient(raised.value) or answer.startswith("301")


def test_a_key_that_is_gone_is_named(planned: list[str]) -> None:
    planned += ["404 NoSuchKey"]
    with pytest.raises(FileNotFoundError, match=mentioning("s3://bucket/1.jpg")):
        storage.read("s3://bucket/1.jpg")


def test_parts_of_objects_and_names_of_all_kinds(s3: PutObjects) -> None:
    names = ["a b.jpg", "c%20d.jpg", "e+f.jpg", "\u00e9/\u00fc.jpg", "*&=,;'().jpg", "empty.jpg"]
    s3("kinds", {name: name.encode() * (name != "empty.jpg") for name in names})
    files = Files.from_list("s3://kinds", names)
    assert [content.decode() for content in bytes_of(files.contents(np.arange(6)))] == [*names[:-1], ""]
    parts = [ObjectPart("s3://kinds/a b.jpg", 2, 3, 7), ObjectPart("s3://kinds/a b.jpg", 0, 0, 7)]
    assert bytes_of(read_objects(parts)) == [b"b.j", b""]
    (error,) = read_objects([ObjectPart("s3://kinds/a b.jpg", 2, 3, 8)])
    assert isinstance(error, FileNotFoundError) and "has 7 bytes, and had 8 when it was indexed" in str(error)


def test_a_fork_of_a_process_that_has_read_reads_too(s3: PutObjects) -> None:
    s3("forked", {"1.jpg": b"content"})
    assert storage.read("s3://forked/1.jpg") == b"content"
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writes, storage.read("s3://forked/1.jpg"))
        finally:
            os._exit(0)
    os.close(writes)
    assert os.read(reads, 100) == b"content"
    os.close(reads)
    os.waitpid(child, 0)


def test_keys_in_the_files_of_aws_are_found_by_pyarrow(
    s3: PutObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3("profiles", {"1.jpg": b"content"})
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    storage._s3.cache_clear()
    storage._open.cache_clear()
    assert storage._s3("profiles", os.environ["AWS_ENDPOINT_URL"], os.getpid()) is None
    assert storage.read("s3://profiles/1.jpg") == b"content"
    storage._s3.cache_clear()
    storage._open.cache_clear()
