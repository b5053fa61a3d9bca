"""cluster/aws.yaml and cluster/gcp.yaml, without a cloud: valid for Ray and for the cloud, and as they promise.

Ray's schema lets anything stand in a `node_config`: it is held against what AWS' and Google's own clients know.
"""

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import ray.autoscaler
from botocore.exceptions import ParamValidationError
from botocore.session import Session
from botocore.validate import validate_parameters
from googleapiclient.discovery_cache import get_static_doc
from ray.autoscaler._private.util import validate_config

from raydali.commands.cluster import HEAD_ENVIRONMENT
from tests.support.cluster import ROOT
from tests.support.ray_up_files import load, prepared, text

BUCKET = {"aws": "s3://my-bucket/runs", "gcp": "gs://my-bucket/runs"}
SPOT_AND_NOT = ("gpu_spot", "gpu_on_demand")


# ---------------------------------------------------------------------------------------------------------------------
# Valid


def test_ray_takes_it(cloud: str) -> None:
    config = prepared(cloud)
    validate_config(config)
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    assert set(config["provider"]) <= set(schema["properties"]["provider"]["properties"])  # Ray lets others pass


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


def test_a_token_is_required_and_no_secret_is_stored(cloud: str) -> None:
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


def test_heads_give_up_nodes_soon_and_stop_jobs_late(cloud: str) -> None:
    options = load(cloud)["docker"]["run_options"]
    assert {f"--env {name}={value}" for name, value in HEAD_ENVIRONMENT.items()} <= set(options)


def test_the_dashboard_is_not_public(cloud: str) -> None:
    config = prepared(cloud)
    (start,) = [command for command in config["head_start_ray_commands"] if "ray start" in command]
    assert "--dashboard-host=127.0.0.1" in start
    assert "8265" not in str(config.get("provider"))
    assert not [option for option in config["docker"]["run_options"] if "publish" in option or "-p " in option]


def test_runs_and_data_have_a_bucket(cloud: str) -> None:
    from raydali.run.folder import RunFolder

    header = text(cloud).partition("cluster_name")[0]
    assert f"--storage {BUCKET[cloud]}" in header
    assert str(RunFolder(BUCKET[cloud], "a")) == f"{BUCKET[cloud]}/a"
    workers = [prepared(cloud)["available_node_types"][name]["node_config"] for name in SPOT_AND_NOT]
    roles = [worker["IamInstanceProfile" if cloud == "aws" else "serviceAccounts"] for worker in workers]
    assert roles[0] == roles[1] and "raydali-worker" in str(roles[0])  # they read and write it by a role, not a key
