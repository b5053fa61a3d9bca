"""cluster/Dockerfile: linted, its properties, and (slow, as root, with debootstrap) its steps run in a fresh Debian."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tests.support.messages import mentions

DOCKERFILE = ROOT / "cluster/Dockerfile"
HADOLINT = Path(sys.executable).with_name("hadolint")


@dataclass
class Stage:
    """A FROM of a Dockerfile, and the instructions below it."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        """What follows each instruction of that keyword."""
        return [rest for each, rest in self.instructions if each == keyword]

    def environment(self) -> dict[str, str]:
        """What ENV sets, as it is written."""
        words = [word for rest in self.all("ENV") for word in shlex.split(rest)]
        return dict(word.split("=", 1) for word in words)


def stages() -> tuple[dict[str, str], list[Stage]]:
    """The arguments before the first stage, and the stages."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    arguments: dict[str, str] = {}
    found: list[Stage] = []
    for line in re.sub(r"\\\n", "", text).splitlines():
        if not line.strip():
            continue
        keyword, rest = line.split(None, 1)
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base, name))
        elif found:
            found[-1].instructions.append((keyword, rest))
        else:
            assert keyword == "ARG"
            name, _, value = rest.partition("=")
            arguments[name] = value
    return arguments, found


# ---------------------------------------------------------------------------------------------------------------------
# As it stands there


def test_the_linter_finds_nothing() -> None:
    done = subprocess.run(
        [HADOLINT, "--no-color", "--failure-threshold", "style", DOCKERFILE], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_it_begins_with_an_official_cuda_base_of_our_cuda() -> None:
    arguments, (build, image) = stages()
    base = re.fullmatch(r"nvidia/cuda:(\d+\.\d+)\.\d+-base-ubuntu24\.04", arguments["BASE"])
    toolkit = re.search(r"^cuda-toolkit==(\d+\.\d+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert base and toolkit and base[1] == toolkit[1]
    assert build.base == image.base == "${BASE}"
    assert build.all("ARG") == image.all("ARG") == ["PYTHON=3.12"]  # Ubuntu 24.04's
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"


def test_everything_comes_from_the_lock_by_its_hashes() -> None:
    _, (build, image) = stages()
    installs = [
        step
        for run in build.all("RUN")
        for step in run.split("&&")
        if re.search(r"\b(pip|uv) .*\b(install|sync)\b", step)
    ]
    assert len(installs) == 3
    *packages, ourselves = installs
    assert all("--require-hashes" in step for step in packages)
    assert "--no-deps --no-build-isolation ." in ourselves
    assert not [run for run in image.all("RUN") if re.search(r"\b(pip|uv|curl|wget)\b", run)]
    assert not [run for stage in (build, image) for run in stage.all("RUN") if re.search(r"https?://", run)]
    assert not build.all("ADD") and not image.all("ADD")


def test_the_image_is_small_and_runs_as_nobody_in_particular() -> None:
    _, (build, image) = stages()
    assert image.all("USER") == ["1000:1000"]
    assert image.all("COPY") == ["--from=build /opt/venv /opt/venv", "jobs /opt/raydali/jobs"]
    for run in build.all("RUN") + image.all("RUN"):
        if "apt-get install" in run:
            assert "--no-install-recommends" in run and "rm -rf /var/lib/apt/lists/*" in run
    assert {"gcc", "python${PYTHON}-dev", "rsync", "openssh-client"} <= set(shlex.split(" ".join(image.all("RUN"))))


def test_the_driver_s_video_libraries_are_asked_for() -> None:
    environment = stages()[1][-1].environment()
    assert set(environment["NVIDIA_DRIVER_CAPABILITIES"].split(",")) == {"compute", "utility", "video"}
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment["HOME"] == "/home/raydali"  # `ray up` looks for it in the image
    assert not [name for name in environment if re.search("TOKEN|SECRET|PASSWORD|KEY", name)]


def test_the_health_check_asks_ray_s_agent() -> None:
    from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
    from ray.dashboard import http_server_agent

    (check,) = stages()[1][-1].all("HEALTHCHECK")
    assert f"http://127.0.0.1:{DEFAULT_DASHBOARD_AGENT_LISTEN_PORT}/api/healthz" in check
    assert '"/api/healthz"' in Path(http_server_agent.__file__).read_text()  # answered without a token


def test_docker_is_sent_what_is_copied_and_no_more() -> None:
    _, (build, image) = stages()
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for rest in build.all("COPY") + image.all("COPY")
        if "--from" not in rest
        for source in shlex.split(rest)[:-1]
    }
    assert sent == copied
    assert all((ROOT / name).exists() for name in sent)


# ---------------------------------------------------------------------------------------------------------------------
# Its steps, run


WITHIN = """
set -e
[[ -z $ALONE ]] || ip link set lo up
mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"; mount -t tmpfs tmpfs "$1/tmp"
exec chroot --userspec="$2" "$1" /usr/bin/env -i "${@:4}" bash -o pipefail -c "$3"
"""
"""root, user, script, NAME=value...: run in a root, in namespaces that go with it."""


@dataclass
class Root:
    """What a stage has become so far."""

    path: Path
    environment: dict[str, str]
    user: str = "0:0"
    folder: str = "/"

    def run(self, script: str, *, alone: bool = False) -> str:
        """Run a script in it as a build would, `alone` with no network, and return what it prints."""
        words = [f"{name}={value}" for name, value in self.environment.items()]
        command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        command += [*(["--net"] if alone else []), "bash", "-c", WITHIN, "within"]
        command += [str(self.path), self.user, f"cd {self.folder}\n{script}", *words]
        env = os.environ | {"ALONE": "yes" if alone else ""}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout

    def build(self, stage: Stage, others: dict[str, Path]) -> None:
        """Follow a stage's instructions."""
        for keyword, rest in stage.instructions:
            if keyword == "ARG":
                name, _, value = rest.partition("=")
                self.environment.setdefault(name, value)
            elif keyword == "ENV":
                for word in shlex.split(rest):
                    name, _, value = word.partition("=")
                    self.environment[name] = value.replace("$PATH", self.environment["PATH"])
            elif keyword == "WORKDIR":
                self.folder = rest
                (self.path / rest[1:]).mkdir(parents=True, exist_ok=True)
            elif keyword == "USER":
                self.user = rest
            elif keyword == "COPY":
                self._copy(rest, others)
            elif keyword == "RUN":
                self.run(rest)

    def _copy(self, rest: str, others: dict[str, Path]) -> None:
        *sources, target = shlex.split(rest)
        origin = ROOT
        if sources[0].startswith("--from="):
            origin = others[sources.pop(0).removeprefix("--from=")]
        for source in sources:
            into = self.path / str(Path(self.folder, target))[1:]
            if (origin / source.lstrip("/")).is_dir():
                into.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", origin / source.lstrip("/"), into], check=True)
            else:
                shutil.copy(origin / source, into)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_steps_run_in_a_fresh_debian(tmp_path: Path) -> None:
    """Not Ubuntu and no CUDA below, so what is seen is that the steps work, and the image's user can train."""
    if os.geteuid() or not (shutil.which("debootstrap") and shutil.which("ip")):
        pytest.skip("needs root, debootstrap and iproute2")
    fresh = tmp_path / "fresh"
    subprocess.run(["debootstrap", "--variant=minbase", "trixie", fresh], check=True, capture_output=True)
    shutil.copy("/etc/resolv.conf", fresh / "etc/resolv.conf")
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", fresh / "trusted.crt")  # a network may have a proxy of its own
    _, found = stages()
    roots: dict[str, Path] = {}
    for stage in found:
        path = tmp_path / (stage.name or "image")
        subprocess.run(["cp", "-a", fresh, path], check=True)
        root = Root(path, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "PYTHON": "3.13"})
        root.environment |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), "/trusted.crt")
        root.environment["DEBIAN_FRONTEND"] = "noninteractive"
        root.build(stage, roots)
        roots[stage.name] = path
    shutil.rmtree(tmp_path / "build")
    sizes = subprocess.run(["du", "-sm", f"{root.path}/opt/venv", root.path], capture_output=True, text=True).stdout
    print(sizes)

    assert root.run("id --user").strip() == "1000"
    of_login = root.run("env --ignore-environment bash --login -c 'command -v ray'")
    assert of_login.strip() == "/opt/venv/bin/ray"
    packages = root.run(
        "python -c 'import importlib.metadata as m; print(*(d.name for d in m.distributions()))'"
    ).split()
    assert {"ray", "torch", "nvidia-dali-cuda120", "boto3", "raydali"} <= set(packages)
    assert not {"moto", "mypy", "pytest", "ruff", "hypothesis", "pip", "uv"} & set(packages)
    google = "from googleapiclient.discovery import build; build('compute', 'v1', developerKey='none')"
    root.run(f'raydali --help && python -c "{google}"', alone=True)
    job = "python /opt/raydali/jobs/imagenet.py --epochs 1 --storage /tmp/runs --name demo"
    assert mentions(root.run(job, alone=True), "finished /tmp/runs/demo")

    (check,) = stage.all("HEALTHCHECK")
    healthy = shlex.join(json.loads(check[check.index("CMD") + 3 :]))
    root.run(
        f"""
        ! {healthy} 2> /dev/null
        umask 077; echo 0123456789abcdef > /tmp/token
        export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/tmp/token
        ray start --head --num-cpus=0 --num-gpus=0 --dashboard-host=127.0.0.1
        for _ in $(seq 60); do {healthy} && exit; sleep 1; done; exit 1
        """,
        alone=True,
    )
