"""cluster/aws.yaml and cluster/gcp.yaml, without a cloud: valid for Ray and for the cloud, and as they promise.

Ray's schema lets anything stand in a `node_config`: it is held against what AWS' and Google's own clients know.
"""

import copy
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import ray.autoscaler
import tyro
import yaml
from botocore.exceptions import ParamValidationError
from botocore.session import Session
from botocore.validate import validate_parameters
from googleapiclient.discovery_cache import get_static_doc
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

from jobs.imagenet import Config
from tests.cluster.support import ROOT

CLOUDS = ("aws", "gcp")
BUCKET = {"aws": "s3://my-bucket/runs", "gcp": "gs://my-bucket/runs"}
SPOT_AND_NOT = ("gpu_spot", "gpu_on_demand")


def text(cloud: str) -> str:
    return (ROOT / f"cluster/{cloud}.yaml").read_text()


def load(cloud: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(text(cloud))
    return config


def prepared(cloud: str) -> dict[str, Any]:
    """As Ray fills it in before it asks the cloud for anything."""
    config: dict[str, Any] = prepare_config(load(cloud))
    return config


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---------------------------------------------------------------------------------------------------------------------
# Valid


def test_ray_takes_it(cloud: str) -> None:
    config = prepared(cloud)
    validate_config(config)
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    assert set(config["provider"]) <= set(schema["properties"]["provider"]["properties"])  # Ray lets others pass


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("idle_timeout_minute",), 10),
        (("docker", "shm_size"), "1g"),
        (("available_node_types", "gpu_spot", "resources", "GPU"), 0.5),
        (("available_node_types", "gpu_spot", "docker", "image"), "another"),
        (("available_node_types", "gpu_spot", "max_worker"), 1),
        (("head_node_type",), "nobody"),
        (("max_workers",), "8"),
    ],
)
def test_ray_would_refuse_mistakes(cloud: str, path: tuple[str, ...], value: object) -> None:
    config = load(cloud)
    inner = config
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises((ValidationError, ValueError)):
        validate_config(prepare_config(config))


def validate_aws(node_config: dict[str, Any]) -> None:
    """Raise if EC2's RunInstances does not know it: unknown fields and wrong types at any depth."""
    shape = Session().get_service_model("ec2").operation_model("RunInstances").input_shape
    validate_parameters(node_config | {"MinCount": 1, "MaxCount": 1}, shape)


def validate_gcp(value: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Raise if it is not what a schema of Google's discovery document describes."""
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    if not isinstance(value, types[schema["type"]]):
        raise TypeError(f"{value!r} is no {schema['type']}")
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{value!r} is none of {schema['enum']}")
    for name, inner in value.items() if isinstance(value, dict) else ():
        validate_gcp(inner, schema["properties"][name], schemas)
    for item in value if isinstance(value, list) else ():
        validate_gcp(item, schema["items"], schemas)


@pytest.fixture(scope="module")
def google() -> dict[str, Any]:
    schemas: dict[str, Any] = json.loads(get_static_doc("compute", "v1"))["schemas"]
    return schemas


def check_node(cloud: str, node_config: dict[str, Any], google: dict[str, Any]) -> None:
    if cloud == "aws":
        validate_aws(node_config)
    else:
        validate_gcp(node_config, {"$ref": "Instance"}, google)


def test_the_cloud_takes_it(cloud: str, google: dict[str, Any]) -> None:
    for node_type in prepared(cloud)["available_node_types"].values():
        check_node(cloud, node_type["node_config"], google)


def test_the_cloud_would_refuse_mistakes(cloud: str, google: dict[str, Any]) -> None:
    node_config = prepared(cloud)["available_node_types"]["gpu_spot"]["node_config"]
    disks = "BlockDeviceMappings" if cloud == "aws" else "disks"
    for plant in ("unknown", "type", "deep"):
        planted = copy.deepcopy(node_config)
        if plant == "unknown":
            planted["InstanceTypes"] = "g6.12xlarge"
        elif plant == "type":
            planted[disks] = "200"
        else:
            planted[disks][0]["size"] = 200
        with pytest.raises((ParamValidationError, KeyError, TypeError)):
            check_node(cloud, planted, google)


# ---------------------------------------------------------------------------------------------------------------------
# As it promises


def test_the_head_schedules_no_workers(cloud: str) -> None:
    config = prepared(cloud)
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert head["max_workers"] == 0
    assert "gpu" not in str(head).replace("gpu-ubuntu", "")  # but for the name of its machine image
    (start,) = [command for command in config["head_start_ray_commands"] if "ray start" in command]
    assert "--num-cpus=0" in start and "--num-gpus=0" in start


def test_gpu_machines_come_spot_and_on_demand_and_go_when_idle(cloud: str) -> None:
    config = prepared(cloud)
    types = config["available_node_types"]
    spot, on_demand = (types[name] for name in SPOT_AND_NOT)
    assert set(types) == {"head", *SPOT_AND_NOT}
    for each in (spot, on_demand):
        assert each["resources"] == {"CPU": 48, "GPU": 4}
        assert each["min_workers"] == 0 < each["max_workers"] <= config["max_workers"]
        assert each["docker"] == {"worker_run_options": ["--gpus all"]}
    assert spot["priority"] > on_demand["priority"]
    assert config["idle_timeout_minutes"] == 10
    if cloud == "aws":
        assert spot["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
        assert "InstanceMarketOptions" not in on_demand["node_config"]
        assert spot["node_config"]["InstanceType"] == on_demand["node_config"]["InstanceType"]
    else:
        models = [each["node_config"]["scheduling"]["provisioningModel"] for each in (spot, on_demand)]
        assert models == ["SPOT", "STANDARD"]
        assert spot["node_config"]["machineType"] == on_demand["node_config"]["machineType"]


def test_the_image_is_of_the_versions_in_the_lock(cloud: str) -> None:
    ray_version = re.search(r"^ray==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    python = re.search(r"^ARG PYTHON=(\S+)", (ROOT / "cluster/Dockerfile").read_text(), re.MULTILINE)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ray_version and python
    tag = f"{version}-ray{ray_version[1]}-py{python[1]}"
    config = prepared(cloud)
    assert config["docker"]["image"].endswith(f"/raydali:{tag}")
    assert f"raydali:{tag}" in (ROOT / "cluster/Dockerfile").read_text()
    assert "head_image" not in config["docker"] and "worker_image" not in config["docker"]
    installs = [*config["setup_commands"], *config["head_setup_commands"], *config["worker_setup_commands"]]
    assert installs == []  # Ray's defaults would install another Ray


def test_a_token_is_needed_and_no_secret_is_sent_or_written_down(cloud: str) -> None:
    config = prepared(cloud)
    assert config["file_mounts"] == {} and config["cluster_synced_files"] == []
    options = config["docker"]["run_options"]
    assert "--env RAY_AUTH_MODE=token" in options
    assert "--env RAY_AUTH_TOKEN_PATH=/run/raydali/auth_token" in options
    assert "--volume /run/raydali:/run/raydali:ro" in options
    token = config["initialization_commands"][0]
    assert "umask 077" in token and "test -s /run/raydali/auth_token" in token
    assert ("aws ssm get-parameter" if cloud == "aws" else "gcloud secrets versions access") in token
    assert not re.search(r"RAY_AUTH_TOKEN=|AKIA[A-Z0-9]|PRIVATE KEY|[0-9a-f]{32}", text(cloud))
    assert "ssh_private_key" not in config["auth"]


def test_the_dashboard_is_not_public(cloud: str) -> None:
    config = prepared(cloud)
    (start,) = [command for command in config["head_start_ray_commands"] if "ray start" in command]
    assert "--dashboard-host=127.0.0.1" in start
    assert "8265" not in str(config.get("provider"))
    assert not [option for option in config["docker"]["run_options"] if "publish" in option or "-p " in option]


def test_runs_and_data_have_a_bucket(cloud: str) -> None:
    from raydali.report.run_folder import RunFolder

    header = text(cloud).partition("cluster_name")[0]
    assert f"--storage {BUCKET[cloud]}" in header
    assert str(RunFolder(BUCKET[cloud], "a")) == f"{BUCKET[cloud]}/a"
    workers = [prepared(cloud)["available_node_types"][name]["node_config"] for name in SPOT_AND_NOT]
    roles = [worker["IamInstanceProfile" if cloud == "aws" else "serviceAccounts"] for worker in workers]
    assert roles[0] == roles[1] and "raydali-worker" in str(roles[0])  # they read and write it by a role, not a key


# ---------------------------------------------------------------------------------------------------------------------
# What runs on the machines


def test_every_command_is_bash(cloud: str) -> None:
    config = prepared(cloud)
    commands = [command for key, value in config.items() if key.endswith("_commands") for command in value]
    assert len(commands) >= 7
    for command in commands:
        done = subprocess.run(["bash", "-n"], input=f"true && ({command})", text=True, capture_output=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


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
    owned = "chown 1000 /data"
    if len(disks) == 0:
        assert first == [owned]
    elif len(disks) == 1:
        assert first == ["mkfs /dev/nvme1n1", "mount -o noatime /dev/nvme1n1 /data", owned]
    else:
        array = "mdadm --create /dev/md/raydali --run --level=0 --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1"
        assert first == [array, "mkfs /dev/md/raydali", "mount -o noatime /dev/md/raydali /data", owned]

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


# ---------------------------------------------------------------------------------------------------------------------
# The page about them


def test_the_page_says_what_there_is() -> None:
    page = (ROOT / "docs/clusters.md").read_text()
    lines = [
        line
        for block in re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    assert all(line.startswith("$ ") for line in lines)
    for cloud in CLOUDS:
        assert {f"$ ray up cluster/{cloud}.yaml", f"$ ray dashboard cluster/{cloud}.yaml"} <= set(lines)
        for command in prepared(cloud)["initialization_commands"]:
            for secret in re.findall(r"--name (\S+auth_token)|--secret=(\S+)", command):
                assert f"{''.join(secret)} " in page
    for name in re.findall(r"(?<!tests/)\bcluster/[\w./-]+[\w]", page):
        assert (ROOT / name).exists(), name
    image = prepared("aws")["docker"]["image"].rpartition("/")[2]
    assert set(re.findall(r"raydali:[\w.-]+\w", page)) == {image}

    from ray.scripts.scripts import cli

    assert set(re.findall(r"\$ ray ([a-z-]+)", page)) <= set(cli.commands)
    jobs = [line for line in lines if "ray job submit" in line]
    on_gpus = 0
    for line in jobs:
        _, _, options = line.partition(" python jobs/imagenet.py ")
        config = tyro.cli(Config, args=shlex.split(options))
        assert config.name and config.max_failures
        on_gpus += config.gpu and config.checkpoint_every > 0
        assert "--working-dir . -- python jobs/imagenet.py" in line
    assert on_gpus >= 2
