"""The folder of a cluster on this machine.

cluster.json   the addresses of the cluster and the mark of its processes
token          authorizes the use of the cluster; mode 600
env            shell variables: after `source env`, `ray` and `raydali` use this cluster
config.yaml    the configuration of the autoscaler
head.log       the output of the head
ray/           Ray's temporary folder
"""

import json
import os
import secrets
import shutil
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from raydali.errors import UsageError

MAX_FOLDER_LENGTH = 40
"""Maximum number of characters: Ray's sockets are in the folder, and a socket's path has at most 107."""


@dataclass(frozen=True, kw_only=True)
class State:
    """A cluster that was started.

    Attributes:
        mark: the value of an environment variable by which its processes are found.
        head: address of Ray's own port, for `ray start --address`.
        dashboard: address for `ray job submit`.
        started: seconds since 1970.
    """

    mark: str
    head: str
    dashboard: str
    started: float


def default_folder() -> str:
    """Return the default folder of this user's cluster."""
    return f"/tmp/raydali-{os.getuid()}"


def checked(folder: str) -> Path:
    """Return the absolute path of a folder.

    Raises:
        UsageError: the path is too long for Ray's sockets.
    """
    path = Path(folder).expanduser().absolute()
    if len(str(path)) > MAX_FOLDER_LENGTH:
        raise UsageError(
            f"--folder {path} has {len(str(path))} characters, and Ray's sockets in it allow {MAX_FOLDER_LENGTH}: "
            "give a shorter one, such as /tmp/r"
        )
    return path


def make(folder: Path) -> None:
    """Create the folder, accessible to this user only.

    Raises:
        UsageError: the folder exists and is not an empty folder of this user, or it cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        there = folder.lstat()
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or any(folder.iterdir()):
            raise UsageError(f"--folder {folder} has other contents: give another one") from None
        folder.chmod(0o700)
    except OSError as error:
        raise UsageError(f"--folder {folder} cannot be created: {error.strerror}; give another one") from error


def write(folder: Path, state: State) -> None:
    """Write the files that describe the cluster, and a new token."""
    secret = folder / "token"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    (folder / "env").write_text(
        f"export RAY_ADDRESS={state.dashboard} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={secret}\nunset RAY_AUTH_TOKEN\n"
    )
    (folder / "cluster.json").write_text(json.dumps(asdict(state), indent=1))


def read(folder: Path) -> State | None:
    """Read the cluster of a folder; None if there is none.

    Raises:
        UsageError: the folder belongs to another user.
    """
    file = folder / "cluster.json"
    try:
        if folder.stat().st_uid != os.getuid():
            raise UsageError(f"--folder {folder} belongs to another user: give another one")
        return State(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None


def token(folder: Path) -> str:
    """Read the cluster's token."""
    return (folder / "token").read_text().strip()


def remove(folder: Path) -> None:
    """Delete the folder with its contents."""
    shutil.rmtree(folder)
