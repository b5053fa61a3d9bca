"""A real Slurm on this machine: its nodes are virtual hosts, which see only their own processes and network."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.chaos.virtual_hosts import Host, namespaces_unavailable, virtual_hosts
from tests.support.cluster import ROOT, descendants, kill, name_of, wait_until_gone

CPUS = 3
"""That each node has, as far as Slurm knows."""
GPUS = ("/dev/null", "/dev/zero")
"""What stands for a node's GPUs: Slurm only counts files."""

CONFIG = """
ClusterName=test
SlurmctldHost={hostname}({head})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
KillWait=10
ReturnToService=2
"""


@dataclass(frozen=True)
class Slurm:
    """A Slurm whose first node is also where its commands run.

    Attributes:
        hosts: its nodes.
        daemons: the process of each node's slurmd; all that the node runs is below it.
        config: its slurm.conf.
    """

    hosts: list[Host]
    daemons: list[int]
    config: Path

    def run(self, *command: str, env: dict[str, str], timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands, in the repository."""
        line = self.hosts[0].command(command)
        env = env | {"SLURM_CONF": str(self.config)}
        return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)

    def job(self, id: str, env: dict[str, str]) -> dict[str, str]:
        """What Slurm has recorded of a job: JobState, ExitCode, Restarts, ..."""
        done = self.run("scontrol", "show", "job", id, env=env)
        assert done.returncode == 0, done.stderr
        return dict(re.findall(r"(\w+)=(\S*)", done.stdout))

    def processes(self) -> list[str]:
        """The command lines of all that the nodes run apart from Slurm."""
        names = [name_of(below) for pid in self.daemons for below in descendants(pid)]
        return [name for name in names if name and "slurm" not in name]


@contextmanager
def slurm(nodes: int, folder: Path, env: dict[str, str]) -> Iterator[Slurm]:
    """A Slurm of this many nodes, its files in `folder`; the test is skipped where there can be none."""
    if why_not := namespaces_unavailable():
        pytest.skip(why_not)
    if not shutil.which("slurmctld") or not shutil.which("slurmd"):
        pytest.skip("needs Slurm: apt-get install slurm-wlm")
    (folder / "state").mkdir(parents=True)
    with virtual_hosts(nodes) as hosts:
        config = folder / "slurm.conf"
        text = CONFIG.format(hostname=socket.gethostname(), head=hosts[0].address, folder=folder)
        for host in hosts:
            text += f"NodeName={host.name} NodeHostname={socket.gethostname()} NodeAddr={host.address} "
            text += f"CPUs={CPUS} Gres=gpu:{len(GPUS)} State=UNKNOWN\n"
            (folder / host.name).mkdir()
        text += "PartitionName=all Nodes=ALL Default=YES MaxTime=60\n"
        config.write_text(text)
        (folder / "gres.conf").write_text("".join(f"Name=gpu File={file}\n" for file in GPUS))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # the only one that asks for no cgroups
        started: list[subprocess.Popen[bytes]] = []

        def start(host: Host, name: str, *command: str) -> None:
            with (folder / f"{name}.log").open("wb") as log:
                line = host.command(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command])
                started.append(subprocess.Popen(line, env=env, stdout=log, stderr=log))

        try:
            start(hosts[0], "slurmctld", "slurmctld", "-D", "-f", str(config))
            for host in hosts:
                start(host, host.name, "bash", "-c", f"slurmd -D -f {config} -N {host.name}; exit $?")
            it = Slurm(hosts, [each.pid for each in started[1:]], config)
            deadline = time.monotonic() + 60
            while it.run("sinfo", "--noheader", "--format=%T %D", env=env).stdout.strip() != f"idle {nodes}":
                logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
                assert time.monotonic() < deadline and all(each.poll() is None for each in started), logs
                time.sleep(0.2)
            yield it
        finally:
            below = [pid for each in started for pid in descendants(each.pid)]
            kill([each.pid for each in started])
            for each in started:
                each.wait()
            assert not wait_until_gone(below, timeout=60)
