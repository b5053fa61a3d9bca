"""The folder of a cluster on this machine: what it was started as, its token, its log, Ray's own files.

cluster.json   how to find it and its processes
token          who holds it may use the cluster; mode 600
env            for a shell: `source` it, and `ray` and `raydali` speak to this cluster
config.yaml    what the autoscaler reads
head.log       what the head says
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

LONGEST_FOLDER = 40
"""Characters: Ray's sockets lie below, and a socket's path has a limit of 107."""


@dataclass(frozen=True, kw_only=True)
class State:
    """A cluster that was started.

    Attributes:
        mark: what its processes have in their environment.
        head: address of Ray's own port, for `ray start --address`.
        dashboard: address for `ray job submit`.
        started: seconds since 1970.
    """

    mark: str
    head: str
    dashboard: str
    started: float


def default_folder() -> str:
    """The folder of this user's cluster."""
    return f"/tmp/raydali-{os.getuid()}"


def checked(folder: str) -> Path:
    """The folder's path.

    Raises:
        UsageError: too long for Ray's sockets.
    """
    path = Path(folder).expanduser().absolute()
    if len(str(path)) > LONGEST_FOLDER:
        raise UsageError(
            f"--folder {path} has {len(str(path))} characters, and Ray's sockets in it bear {LONGEST_FOLDER}: "
            "give a shorter one, such as /tmp/r"
        )
    return path


def make(folder: Path) -> None:
    """Make the folder, for this user alone.

    Raises:
        UsageError: something else is there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        there = folder.lstat()
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or any(folder.iterdir()):
            raise UsageError(f"--folder {folder} is there already and holds other things: give another one") from None
        folder.chmod(0o700)
    except OSError as error:
        raise UsageError(f"--folder {folder} cannot be made: {error.strerror}; give another one") from error


def write(folder: Path, state: State) -> None:
    """Write what is needed to find and use the cluster, a new token included."""
    secret = folder / "token"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    (folder / "env").write_text(
        f"export RAY_ADDRESS={state.dashboard} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={secret}\nunset RAY_AUTH_TOKEN\n"
    )
    (folder / "cluster.json").write_text(json.dumps(asdict(state), indent=1))


def read(folder: Path) -> State | None:
    """The cluster of this folder, or None where there is none.

    Raises:
        UsageError: the folder is another user's.
    """
    file = folder / "cluster.json"
    try:
        if folder.stat().st_uid != os.getuid():
            raise UsageError(f"--folder {folder} is another user's: give another one")
        return State(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None


def token(folder: Path) -> str:
    """The cluster's token."""
    return (folder / "token").read_text().strip()


def remove(folder: Path) -> None:
    """Take the folder and all in it away."""
    shutil.rmtree(folder)
