"""What cluster/aws.yaml and cluster/gcp.yaml run on the machines, run here: disks become /data, the token a file."""

import os
import pty
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from ray.autoscaler._private.command_runner import _with_interactive

from raydali import spot_notices
from tests.support.ray_up_files import prepared


def test_every_command_is_bash(cloud: str) -> None:
    config = prepared(cloud)
    commands = [command for key, value in config.items() if key.endswith("_commands") for command in value]
    assert len(commands) >= 7
    for command in commands:
        done = subprocess.run(["bash", "-n"], input=f"true && ({command})", text=True, capture_output=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def start_commands(cloud: str) -> list[str]:
    """Those that start Ray, on the head and on workers, and what belongs to them."""
    config = prepared(cloud)
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    return [command for command in commands if command != "ray stop"]


def run_as_ray_up_does(command: str, home: Path, **doubles: str) -> None:
    """Run it in a terminal that goes away behind it, with Ray's own words before it and doubles of what it calls."""
    for name, body in doubles.items():
        double = home / name
        double.write_text(f"#!/bin/bash\n{body}\n")
        double.chmod(0o755)
    (home / ".bashrc").write_text(f"export PATH={home}:/usr/bin:/bin\n")
    words = [word.strip("'") for word in _with_interactive("COMMAND")]
    words[-1] = words[-1].replace("COMMAND", command)
    pid, terminal = pty.fork()
    if not pid:
        os.execve("/bin/bash", words, {"HOME": str(home)})
    with suppress(OSError):  # so Linux says that nobody has the terminal open any more
        while os.read(terminal, 1024):
            pass
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0


def test_nodes_inherit_no_settings_of_ray_up(cloud: str, tmp_path: Path) -> None:
    """Its words before each command are OMP_NUM_THREADS=1 and PYTHONWARNINGS=ignore."""
    starts = [command for command in start_commands(cloud) if "ray start" in command]
    assert len(starts) == 2
    for command in [*starts, "ray stop"]:
        run_as_ray_up_does(command, tmp_path, ray=f"env > {tmp_path}/environment")
        inherited = {line.partition("=")[0] for line in (tmp_path / "environment").read_text().splitlines()}
        expected = {"OMP_NUM_THREADS", "PYTHONWARNINGS"} if command == "ray stop" else set()
        assert inherited & {"OMP_NUM_THREADS", "PYTHONWARNINGS"} == expected


def test_every_worker_listens_for_notices_of_its_cloud(cloud: str, tmp_path: Path) -> None:
    (command,) = [each for each in prepared(cloud)["worker_start_ray_commands"] if "spot_notices" in each]
    command = command.replace("/tmp/ray/session_latest/logs", str(tmp_path))
    run_as_ray_up_does(command, tmp_path, python=f"sleep 1; echo $*; mv {tmp_path}/spot_notices.log {tmp_path}/done")
    deadline = time.monotonic() + 60
    while not (tmp_path / "done").exists():  # it goes on behind the end of the terminal
        assert time.monotonic() < deadline
        time.sleep(0.05)
    module, name, given = (tmp_path / "done").read_text().split()
    assert (module, name, given) == ("-m", spot_notices.__name__, cloud) and given in spot_notices.CLOUDS


DOUBLES = {
    "sudo": '[[ $1 == -* ]] && shift 2; "$@"',
    "mountpoint": 'grep -qx "${@: -1}" mounted',
    "lsblk": 'echo "/dev/nvme0n1 Amazon EBS"; for disk in $DISKS; do echo "$disk Amazon NVMe Instance Storage"; done',
    "find": 'for disk in $DISKS; do echo "$disk"; done',
    "blkid": "test -e labelled",
    "mkfs.ext4": 'echo "mkfs ${@: -1}" >> done; touch labelled',
    "mdadm": 'echo "mdadm $*" >> done',
    "mount": 'echo "mount $*" >> done; echo "${@: -1}" >> mounted',
    "mkdir": "true",
    "chown": 'echo "chown $*" >> done',
    "install": 'mkdir "${@: -1}"',
    "aws": 'test "$1 $7" = "ssm --with-decryption" && printf "%s\\n" $TOKEN',
    "gcloud": 'test "$1 $3" = "secrets access" && printf "%s\\n" $TOKEN',
}
"""What a machine is to the commands: its disks are kept in files of the current folder."""


def command_with(word: str, cloud: str) -> str:
    """The one command before the container's start that has this word."""
    (command,) = [each for each in prepared(cloud)["initialization_commands"] if word in each]
    return str(command)


@pytest.fixture
def doubles(tmp_path: Path) -> str:
    """A PATH where what would change a machine only says so."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in DOUBLES.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@pytest.mark.parametrize("disks", [(), ("/dev/nvme1n1",), ("/dev/nvme1n1", "/dev/nvme2n1")], ids=len)
def test_nvme_becomes_data_once(cloud: str, disks: tuple[str, ...], tmp_path: Path, doubles: str) -> None:
    def run() -> list[str]:
        (tmp_path / "done").write_text("")
        env = {"PATH": doubles, "DISKS": " ".join(disks)}
        subprocess.run(["bash", "-c", command_with("mkfs", cloud)], cwd=tmp_path, env=env, check=True)
        return (tmp_path / "done").read_text().splitlines()

    (tmp_path / "mounted").write_text("/\n")
    first = run()
    owned, mount = "chown 1000 /data", "mount -o noatime"
    if len(disks) == 0:
        assert first == [owned]
    elif len(disks) == 1:
        assert first == ["mkfs /dev/nvme1n1", f"{mount} /dev/nvme1n1 /data", owned]
    else:
        array = "mdadm --create /dev/md/raydali --run --level=0 --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1"
        assert first == [array, "mkfs /dev/md/raydali", f"{mount} /dev/md/raydali /data", owned]

    assert run() == [owned]  # again: nothing is formatted
    if disks:  # after a reboot: what is there is mounted, not formatted
        (tmp_path / "mounted").write_text("/\n")
        assert run() == ["mount LABEL=raydali /data", owned]


def test_disks_that_aws_image_has_mounted_are_used_as_they_are(tmp_path: Path, doubles: str) -> None:
    (tmp_path / "mounted").write_text("/opt/dlami/nvme\n")
    env = {"PATH": doubles, "DISKS": "/dev/nvme1n1"}
    subprocess.run(["bash", "-c", command_with("mkfs", "aws")], cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "done").read_text().splitlines() == ["mount --bind /opt/dlami/nvme /data", "chown 1000 /data"]


def test_the_token_is_for_its_owner_alone_and_must_be_there(cloud: str, tmp_path: Path, doubles: str) -> None:
    folder = tmp_path / "run"
    script = command_with("auth_token", cloud).replace("/run/raydali", str(folder))
    (tmp_path / "bin/mkdir").unlink()
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env={"PATH": doubles, "TOKEN": "abc"})
    assert done.returncode == 0
    token = folder / "auth_token"
    assert token.read_text() == "abc"
    assert token.stat().st_mode & 0o777 == 0o600

    token.unlink()
    (tmp_path / "bin/install").write_text("#!/bin/bash\n")
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env={"PATH": doubles, "TOKEN": ""})
    assert done.returncode != 0
