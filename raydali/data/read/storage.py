"""Access to S3 and Google's storage: pyarrow lists files, obstore reads from S3; objects.py reads many at a time.

Files in a clone may be pointers of Git LFS and git-annex: short texts in place of files that have not been fetched.
"""

import os
import pwd
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raydali.data.read.read_counts import COUNTS
from raydali.errors import UsageError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Store
    from pyarrow.fs import FileInfo, FileSystem

CONNECTIONS = 128
"""Limit of connections of a process through pyarrow to S3."""
_ATTEMPTS, _FIRST_PAUSE = 5, 0.1
"""A request that is refused or broken is repeated at once; what fails longer is an outage (reading.py)."""
_CONNECT_SECONDS = 5
_STALLED_SECONDS = 20
"""A connection that sends nothing for so long counts as broken."""
_LISTED_SECONDS, _LIST_ATTEMPTS = 10, 8
"""The same for pyarrow, which tries again for 6 s if it is refused. AWS' own limits are 1 s to connect and 3 s to be
answered, in which a busy server does not list a large bucket."""
_LIST_RETRIES, _LISTED_AT_ONCE = 3, 10_000
"""The same for obstore; a listing that fails is one for pyarrow."""
_GCS_RETRY_SECONDS = 20
UNKNOWN = -1, 0
"""Size and tag of a file that is not reached, see `files.Versions`."""
_SECRET = re.compile(
    r"://(?!anonymous@)[^/?#\s]*@"
    r"|(s3|gs|gcs)://[^/?#\s]*:"  # a key may contain slashes, and the rest looks like a path then
    r"|[?&][\w.-]*(key|secret|token|password|credential|sig)[\w.-]*=",
    re.IGNORECASE,
)
_POINTERS = {
    b"version https://git-lfs.github.com/spec/v1": ("Git LFS", "git lfs pull"),
    b"/annex/objects/": ("git-annex", "git annex get ."),
}
_ENOUGH = 12  # bytes that no other file begins with


ListedObject = tuple[str, int, int, bool]
"""BUCKET/KEY, its version (see `files.Versions`), and whether it is a file."""


class StoreError(OSError):
    """The storage does not answer as it should; no single file is to blame."""


def refuse_secrets(text: str) -> None:
    """Refuse a URI that contains a key or a password: it would be printed, stored and sent on.

    Args:
        text: a URI, a path, or an argument of a command line.

    Raises:
        UsageError: it does; the message shows only the kind of storage.
    """
    if "://" in text and _SECRET.search(text):
        raise UsageError(
            f"the URI {re.findall(r'[a-zA-Z0-9+.-]*://', text)[0]}... has a user or a key, which would be recorded: "
            "use the environment instead (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS)"
        )


def file_system(uri: str) -> "FileSystem":
    """The pyarrow FileSystem of an `s3://` or `gs://` URI; its paths are URIs without their scheme.

    S3 is configured by AWS_ENDPOINT_URL and the other variables and files of AWS, Google's storage by its default
    credentials, or by DALI_GCS_ANONYMOUS and DALI_GCS_ENDPOINT_URL, which DALI reads as well. A process opens each
    file system once.
    """
    scheme, _, path = uri.partition("://")
    endpoint = s3_endpoint() if scheme == "s3" else os.environ.get("DALI_GCS_ENDPOINT_URL", "")
    return _open(scheme, path.partition("/")[0], endpoint, os.getpid())


def s3_endpoint() -> str:
    """Return the URL of the server of S3 in the environment; an empty text stands for the server of AWS."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")


# For each process, since a forked one must not use its parent's connections.
@cache
def _open(scheme: str, bucket: str, endpoint: str, _process: int) -> "FileSystem":
    import pyarrow
    from pyarrow.fs import AwsDefaultS3RetryStrategy, GcsFileSystem, S3FileSystem, resolve_s3_region

    options: dict[str, Any] = {}
    if endpoint:
        options["scheme"], _, options["endpoint_override"] = endpoint.rstrip("/").partition("://")
    if scheme == "s3":
        # It limits the connections of S3's client, which are 25 otherwise, however many threads there are.
        pyarrow.set_io_thread_count(max(CONNECTIONS, pyarrow.io_thread_count()))
        if not endpoint:
            options["region"] = resolve_s3_region(bucket)
        options |= {"connect_timeout": _CONNECT_SECONDS, "request_timeout": _LISTED_SECONDS}
        return S3FileSystem(retry_strategy=AwsDefaultS3RetryStrategy(max_attempts=_LIST_ATTEMPTS), **options)
    anonymous = os.environ.get("DALI_GCS_ANONYMOUS", "0") not in ("", "0")
    return GcsFileSystem(anonymous=anonymous, retry_time_limit=timedelta(seconds=_GCS_RETRY_SECONDS), **options)


class ObjectPart(NamedTuple):
    """An object of a bucket, or a part of it.

    Attributes:
        uri: `s3://` or `gs://`.
        offset, length: the part, in bytes; without a length, the whole object.
        size: of the object when it was indexed, in bytes; None if that is not known, or need not be the same.
        tag: a number for its version then, see `files.Versions`; 0 if that is not known.
    """

    uri: str
    offset: int = 0
    length: int | None = None
    size: int | None = None
    tag: int = 0


def tag_of(etag: str | None) -> int:
    """Return the positive number for an ETag; 0 if there is none."""
    if not etag:
        return 0
    try:
        return int(etag[1:16], 16) + 1  # of an MD5 in quotes, as S3 has them
    except ValueError:
        return int.from_bytes(blake2b(etag.encode(), digest_size=7).digest()) + 1


def read(uri: str) -> bytes:
    """The content of a file, never from a cache.

    Args:
        uri: an absolute path, or an `s3://` or `gs://` URI.

    Raises:
        FileNotFoundError: there is none.
        StoreError: the object store does not answer; names the URI and the reason.
        OSError: a local file cannot be read.
    """
    return Path(uri).read_bytes() if uri.startswith("/") else bytes(fetch(ObjectPart(uri))[0])


def fetch(part: ObjectPart) -> tuple[memoryview, int]:
    """Return the content of a part, never from a cache, and the number for its ETag, else the negative time, in ns.

    Raises:
        FileNotFoundError: there is no such object, or it has another size than when it was indexed.
        StoreError: the object store does not answer; names the URI and the reason.
    """
    scheme, _, path = part.uri.partition("://")
    bucket, _, key = path.partition("/")
    if part.length == 0:
        return memoryview(b""), 0
    try:
        store = _s3(bucket, s3_endpoint(), os.getpid()) if scheme == "s3" else None
        content, size, tag = _by_arrow(part) if store is None else _from_s3(store, key, part)
    except OSError as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else StoreError
        raise kind(f"cannot read {part.uri}: {reason(error)}") from error
    COUNTS.add(requests=1, bytes=content.nbytes)
    if part.size not in (None, size):
        raise FileNotFoundError(f"{part.uri} has {size} bytes, and had {part.size} when it was indexed: start again")
    return content, tag


def _by_arrow(part: ObjectPart) -> tuple[memoryview, int, int]:
    system, path, now = file_system(part.uri), part.uri.partition("://")[2], time.time_ns()
    if part.length is None:
        with system.open_input_stream(path, compression=None) as stream:
            content = memoryview(stream.read())
        return content, content.nbytes, -now
    with system.open_input_file(path) as file:
        return memoryview(file.read_at(part.length, part.offset)), file.size(), -now


def _from_s3(store: "S3Store", key: str, part: ObjectPart) -> tuple[memoryview, int, int]:
    import obstore
    from obstore.exceptions import BaseError

    options: Any = {} if part.length is None else {"range": (part.offset, part.offset + part.length)}
    for attempt in range(_ATTEMPTS):
        try:
            result = obstore.get(store, key, options=options)
            return memoryview(result.bytes()), result.meta["size"], tag_of(result.meta["e_tag"])
        except BaseError as error:
            answer, may_pass = _answer(str(error))
            if not may_pass or attempt == _ATTEMPTS - 1:
                raise OSError(answer) from error
        COUNTS.add(repeated=1)
        time.sleep(_FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1.0))
    raise AssertionError


def _answer(text: str) -> tuple[str, bool]:
    """Return the reason in an error of obstore, and whether the error may pass."""
    status, code = re.search(r"status code: (\d+)", text), re.search(r"<Code>(\w+)", text)
    if "Received redirect" in text:
        return "HTTP status 301: set AWS_REGION to the region of the bucket", False
    if status is None:
        return text.partition("\n")[0].rpartition(" - ")[2].removeprefix("Generic S3 error: "), "HTTP error" in text
    name = code[1] if code else ""
    remedy = {
        "ExpiredToken": ": the credentials have expired, so give new ones and start again",
        "RequestTimeTooSkewed": ": the clock of this machine is wrong",
    }.get(name, "")
    return f"HTTP status {status[1]} {name}{remedy}".rstrip(), int(status[1]) in (408, 429, *range(500, 600))


_obstore = {"runs": False, "lost": False}
"""A process with obstore's threads `runs` it; a fork of one has `lost` them, and can start none."""
os.register_at_fork(after_in_child=lambda: _obstore.update(lost=_obstore["runs"]))


# For each process, since a forked one must not use its parent's connections.
@cache
def _s3(bucket: str, endpoint: str, _process: int, retries: int = 0) -> "S3Store | None":
    """Return a bucket as obstore reads it; None if pyarrow has to: it alone finds credentials in the files of AWS."""
    from obstore.store import S3Store
    from pyarrow.fs import resolve_s3_region

    files = (os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), "~/.aws/config")
    in_files = "AWS_PROFILE" in os.environ or any(Path(file).expanduser().is_file() for file in files)
    if _obstore["lost"] or ("AWS_ACCESS_KEY_ID" not in os.environ and in_files):
        return None
    _obstore["runs"] = True
    options: dict[str, Any] = {}
    if endpoint:
        options["endpoint"] = endpoint
    elif not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys():
        options["region"] = resolve_s3_region(bucket)
    return S3Store(
        bucket,
        **options,
        client_options={
            "allow_http": True,
            "connect_timeout": f"{_CONNECT_SECONDS}s",
            "read_timeout": f"{_STALLED_SECONDS}s",
        },
        retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=_STALLED_SECONDS)},
    )


def listed_by_obstore(root: str) -> Iterator[ListedObject]:
    """Yield all objects below a URI of S3, with ETags, and its empty folders; in a third of pyarrow's time.

    Raises:
        OSError: there are none, or obstore cannot list them, for example as it accepts no key with a tab: pyarrow may.
    """
    import obstore
    from obstore.exceptions import BaseError

    bucket, _, prefix = root.partition("://")[2].partition("/")
    if not root.startswith("s3") or (store := _s3(bucket, s3_endpoint(), os.getpid(), _LIST_RETRIES)) is None:
        raise OSError(root)
    empty = []
    metas: Sequence[ObjectMeta] = ()
    try:
        for metas in obstore.list(store, prefix or None, chunk_size=_LISTED_AT_ONCE):
            for meta in metas:
                if meta["size"]:
                    yield f"{bucket}/{meta['path']}", meta["size"], tag_of(meta["e_tag"]), True
                else:  # a file, or a folder: obstore removes the slash
                    empty.append(f"{bucket}/{meta['path']}")
    except BaseError as error:
        raise OSError(root) from error
    if not metas:
        raise OSError(root)
    yield from map(_listed, file_system(root).get_file_info(empty))


def listed_by_arrow(root: str) -> Iterator[ListedObject]:
    """Yield all objects and folders below a URI.

    Raises:
        OSError: they cannot be listed.
    """
    from pyarrow.fs import FileSelector

    yield from map(_listed, file_system(root).get_file_info(FileSelector(root.partition("://")[2], recursive=True)))


def _listed(info: "FileInfo") -> ListedObject:
    return info.path, info.size if info.is_file else -1, -(info.mtime_ns or 0), info.is_file


def version_of(path: str) -> tuple[int, int]:
    """Return the size of a file and the number for its version, see `files.Versions`; UNKNOWN if it is not reached.

    Args:
        path: absolute, or an `s3://` or `gs://` URI.
    """
    try:
        if path.startswith("/"):
            return os.stat(path).st_size, 0
        scheme, _, key = path.partition("://")
        bucket, _, name = key.partition("/")
        if scheme == "s3" and (store := _s3(bucket, s3_endpoint(), os.getpid(), _LIST_RETRIES)) is not None:
            meta = store.head(name)
            return meta["size"], tag_of(meta["e_tag"])
        _, size, tag, is_file = _listed(*file_system(path).get_file_info([key]))
        return (size, tag) if is_file else UNKNOWN
    except Exception:  # obstore has errors of its own
        return UNKNOWN


def modified_ns(path: str) -> int | None:
    """Return when a file was last modified, in ns; None if that is unknown, or the file cannot be reached.

    Args:
        path: a local path, or a URI.
    """
    try:
        if "://" not in path:
            return os.stat(path).st_mtime_ns
        (info,) = file_system(path).get_file_info([path.partition("://")[2]])
    except OSError:
        return None
    return info.mtime_ns  # type: ignore[no-any-return]


def is_folder(path: str) -> bool:
    """Return whether a path or URI is a folder; False if it cannot be reached."""
    from pyarrow.fs import FileType

    if "://" not in path:
        return os.path.isdir(path)
    try:
        (info,) = file_system(path).get_file_info([path.partition("://")[2]])
    except OSError:
        return False
    return bool(info.type == FileType.Directory)


def reason(error: Exception) -> str:
    """An error's message on one line; of what another user owns, see `not_permitted`."""
    return not_permitted(error) or " ".join(str(error).split())[:300]


def not_permitted(error: Exception) -> str:
    """Return which local path belongs to which other user, if that is why the call failed; otherwise an empty text."""
    named = re.search("'(/.+?)'", str(error))  # pyarrow's errors have no `filename`
    if not isinstance(error, PermissionError) or named is None:
        return ""
    path = named[1]
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    owner, user, name = os.lstat(path).st_uid, os.geteuid(), ""
    with suppress(KeyError):  # a container may not know it
        name = f" ({pwd.getpwuid(owner).pw_name})"
    belongs = f"{path} belongs to user {owner}{name}, and this process runs as user {user}"
    return "" if owner == user else belongs


def why_pointer(head: bytes) -> str:
    """Return the reason why a file with these first bytes, at least 12, is a pointer; empty if it is none."""
    if len(head) >= _ENOUGH:
        for begin, (tool, command) in _POINTERS.items():
            if begin.startswith(head[: len(begin)]):
                return f"a pointer of {tool}, not the file: run `{command}`"
    return ""
