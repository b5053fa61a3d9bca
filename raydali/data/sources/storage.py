"""Access to S3 and Google's storage through pyarrow, to list files and to read those that DALI cannot.

Files in a clone may be pointers of Git LFS and git-annex: short texts in place of files that have not been fetched.
"""

import os
import re
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydali.errors import UsageError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

CONNECTIONS = 128
"""Limit of connections of a process to S3."""
_GCS_RETRY_SECONDS = 20
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
    endpoint = os.environ.get("AWS_ENDPOINT_URL" if scheme == "s3" else "DALI_GCS_ENDPOINT_URL", "")
    return _open(scheme, path.partition("/")[0], endpoint, os.getpid())


# For each process, since a forked one must not use its parent's connections.
@cache
def _open(scheme: str, bucket: str, endpoint: str, _process: int) -> "FileSystem":
    import pyarrow
    from pyarrow.fs import FileSystem, GcsFileSystem

    if scheme == "s3":
        # It limits the connections of S3's client, which are 25 otherwise, however many threads there are.
        pyarrow.set_io_thread_count(max(CONNECTIONS, pyarrow.io_thread_count()))
        return FileSystem.from_uri(f"s3://{bucket}")[0]
    options: dict[str, Any] = {"retry_time_limit": timedelta(seconds=_GCS_RETRY_SECONDS)}
    if endpoint:
        options["scheme"], _, options["endpoint_override"] = endpoint.rstrip("/").partition("://")
    return GcsFileSystem(anonymous=os.environ.get("DALI_GCS_ANONYMOUS", "0") not in ("", "0"), **options)


def read(uri: str) -> bytes:
    """The content of a file.

    Args:
        uri: an absolute path, or an `s3://` or `gs://` URI.

    Raises:
        FileNotFoundError: there is none.
        StoreError: the object store does not answer; names the URI and the reason.
        OSError: a local file cannot be read.
    """
    if uri.startswith("/"):
        return Path(uri).read_bytes()
    try:
        with file_system(uri).open_input_stream(uri.partition("://")[2], compression=None) as file:
            return bytes(file.read())
    except OSError as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else StoreError
        raise kind(f"cannot read {uri}: {reason(error)}") from error


def modified_ns(path: str) -> int | None:
    """Return when a file was last modified, in ns; None if that is unknown, or the file cannot be reached.

    Args:
        path: a local path, or a URI.
    """
    try:
        if "://" not in path:
            return os.stat(path).st_mtime_ns
        (found,) = file_system(path).get_file_info([path.partition("://")[2]])
    except OSError:
        return None
    return found.mtime_ns  # type: ignore[no-any-return]


def is_folder(path: str) -> bool:
    """Return whether a path or URI is a folder; False if it cannot be reached."""
    from pyarrow.fs import FileType

    if "://" not in path:
        return os.path.isdir(path)
    try:
        (found,) = file_system(path).get_file_info([path.partition("://")[2]])
    except OSError:
        return False
    return bool(found.type == FileType.Directory)


def reason(error: OSError) -> str:
    """A storage library's error message on one line."""
    return " ".join(str(error).split())[:300]


def why_pointer(head: bytes) -> str:
    """Return the reason why a file with these first bytes, at least 12, is a pointer; empty if it is none."""
    if len(head) >= _ENOUGH:
        for begin, (tool, command) in _POINTERS.items():
            if begin.startswith(head[: len(begin)]):
                return f"a pointer of {tool}, not the file: run `{command}`"
    return ""
