"""cluster/kuberay/: rendered as kustomize would, held against KubeRay's own schemas, and as it promises.

The schemas are CustomResourceDefinitions in YAML, in the folder that KUBERAY_CRDS names: KubeRay ships them in its Helm
chart's crds/. Without them the tests of schemas skip, and say so; KubeRay's rules in CEL are not evaluated.
"""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import tyro
import yaml
from jsonschema import Draft202012Validator

from jobs.imagenet import Config
from tests.cluster.support import ROOT

FOLDER = ROOT / "cluster/kuberay"
VARIANTS = ("base", "kueue", "volcano")
KINDS = ("RayJob", "RayCluster")
Manifest = dict[str, Any]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---------------------------------------------------------------------------------------------------------------------
# The little of kustomize that is used


def render(folder: Path) -> list[Manifest]:
    """The manifests that `kubectl kustomize` makes of a folder."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "resources", "images", "labels", "patches", "replacements"}
    assert set(kustomization) <= known, "render() knows no more"
    manifests: list[Manifest] = []
    for resource in kustomization["resources"]:
        path = folder / resource
        # By way of JSON, or what YAML shares by its anchors would be patched together.
        manifests += render(path) if path.is_dir() else json.loads(json.dumps([*yaml.safe_load_all(path.read_text())]))
    for patch in kustomization.get("patches", ()):
        targets = [each for each in manifests if each["kind"] == patch["target"]["kind"]]
        assert targets
        for manifest in targets:
            jsonpatch.apply_patch(manifest, yaml.safe_load(patch["patch"]), in_place=True)
    for label in kustomization.get("labels", ()):
        for manifest in manifests:
            manifest["metadata"].setdefault("labels", {}).update(label["pairs"])
    for image in kustomization.get("images", ()):
        for container in containers(manifests):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    for replacement in kustomization.get("replacements", ()):
        (source,) = [each for each in manifests if each["kind"] == replacement["source"]["kind"]]
        value = source[replacement["source"]["fieldPath"]]
        for target in replacement["targets"]:
            (manifest,) = [each for each in manifests if each["kind"] == target["select"]["kind"]]
            (path,) = target["fieldPaths"]
            *parents, last = path.split(".")
            inner = manifest
            for name in parents:
                inner = inner[name]
            inner[last] = copy.deepcopy(value)
    return manifests


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """All containers, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("containers", "initContainers"):
                yield from inner
            yield from containers(inner)
    elif isinstance(value, list):
        for item in value:
            yield from containers(item)


def manifest(variant: str, kind: str) -> Manifest:
    (found,) = [each for each in render(FOLDER / variant) if each["kind"] == kind]
    return found


def clusters(variant: str) -> list[dict[str, Any]]:
    """The RayCluster's spec, and the one in the RayJob."""
    return [manifest(variant, "RayCluster")["spec"], manifest(variant, "RayJob")["spec"]["rayClusterSpec"]]


def test_it_renders_as_kustomize_does(variant: str) -> None:
    tool = next((tool for tool in ("kustomize", "kubectl") if shutil.which(tool)), None)
    if tool is None:
        pytest.skip("needs kustomize or kubectl")
    command = [tool, "build"] if tool == "kustomize" else [tool, "kustomize"]
    done = subprocess.run([*command, FOLDER / variant], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    def by_kind(manifests: list[Manifest]) -> list[Manifest]:
        return sorted(manifests, key=lambda each: str(each["kind"]))

    assert by_kind(list(yaml.safe_load_all(done.stdout))) == by_kind(render(FOLDER / variant))


# ---------------------------------------------------------------------------------------------------------------------
# Valid for KubeRay


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A CRD's schema as JSON schema in which no object may have a field that the schema does not name."""
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "properties":
            made[name] = {field: strict(inner) for field, inner in value.items()}
        elif name in ("items", "not") or (name == "additionalProperties" and isinstance(value, dict)):
            made[name] = strict(value)
        elif name != "format":  # allOf, anyOf, oneOf only restrict values: fields are named beside them
            made[name] = value
    if schema.get("nullable"):
        made["type"] = [schema["type"], "null"]
    if schema.get("type") == "object" and "additionalProperties" not in schema:
        made["additionalProperties"] = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if schema.get("x-kubernetes-embedded-resource"):
        made["properties"] = {"apiVersion": {}, "kind": {}, "metadata": METADATA} | made.get("properties", {})
    return made


METADATA = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("name", "generateName", "namespace")},
        **{name: {"type": "object", "additionalProperties": {"type": "string"}} for name in ("labels", "annotations")},
    },
    "additionalProperties": False,
}
"""Of an object itself, which a CRD leaves to Kubernetes: what a manifest would set of it."""


def duplicates(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    """Entries of lists that Kubernetes keeps as maps, and so refuses to have twice."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from duplicates(inner, schema.get("properties", {}).get(name, {}), f"{path}.{name}")
    elif isinstance(value, list):
        if keys := schema.get("x-kubernetes-list-map-keys"):
            items = schema["items"]["properties"]
            seen = [tuple(each.get(key, items[key].get("default")) for key in keys) for each in value]
            yield from (f"{path}: {each} twice" for each in {each for each in seen if seen.count(each) > 1})
        for index, item in enumerate(value):
            yield from duplicates(item, schema.get("items", {}), f"{path}[{index}]")


Schemas = dict[tuple[str, str], tuple[dict[str, Any], Draft202012Validator]]


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    """By apiVersion and kind: the schema as it is, and what validates against it strictly."""
    folder = os.environ.get("KUBERAY_CRDS")
    if not folder:
        pytest.skip("needs KubeRay's CRDs: KUBERAY_CRDS names no folder")
    found: Schemas = {}
    for path in Path(folder).glob("*.yaml"):
        for crd in yaml.load_all(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            for version in crd["spec"]["versions"]:
                schema = version["schema"]["openAPIV3Schema"]
                validator = strict(schema)
                validator["properties"]["metadata"] = METADATA
                validator["required"] = ["apiVersion", "kind", "metadata", "spec"]
                key = f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]
                found[key] = schema, Draft202012Validator(validator)
    assert {kind for _, kind in found} >= set(KINDS), f"no CRDs of these in {folder}"
    return found


def faults(manifest: Manifest, schemas: Schemas) -> list[str]:
    """What Kubernetes would refuse or silently drop."""
    schema, validator = schemas[manifest["apiVersion"], manifest["kind"]]
    errors = [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(manifest)]
    return errors + list(duplicates(manifest, schema, "$"))


@pytest.mark.parametrize("kind", KINDS)
def test_kuberay_s_schema_takes_it(variant: str, kind: str, schemas: Schemas) -> None:
    rendered = manifest(variant, kind)
    assert rendered["apiVersion"] == "ray.io/v1"
    assert faults(rendered, schemas) == []


HEAD_POD = "/spec/rayClusterSpec/headGroupSpec/template/spec"
WORKERS = "/spec/rayClusterSpec/workerGroupSpecs/0"
MISTAKES: dict[str, dict[str, Any]] = {
    "unknown at the top": {"op": "add", "path": "/specs", "value": {}},
    "unknown in metadata": {"op": "add", "path": "/metadata/label", "value": {}},
    "unknown in the job": {"op": "add", "path": "/spec/shutdownAfterJobFinish", "value": True},
    "unknown in the cluster": {"op": "add", "path": "/spec/rayClusterSpec/autoscalerOption", "value": {}},
    "unknown in a group": {"op": "add", "path": f"{WORKERS}/maxReplica", "value": 4},
    "unknown in a pod": {"op": "add", "path": f"{HEAD_POD}/nodeSelectors", "value": {}},
    "unknown in a pod's metadata": {
        "op": "add",
        "path": f"{WORKERS}/template/metadata/annotation",
        "value": {"a": "b"},
    },
    "unknown in a container": {"op": "add", "path": f"{HEAD_POD}/containers/0/limits", "value": {}},
    "unknown in a probe": {"op": "add", "path": f"{HEAD_POD}/containers/0/livenessProbe/httpGet/url", "value": "/"},
    "unknown in a volume": {"op": "add", "path": f"{HEAD_POD}/volumes/0/emptyDir/size", "value": "1Gi"},
    "unknown in a security context": {
        "op": "add",
        "path": f"{HEAD_POD}/containers/0/securityContext/capabilities/dropped",
        "value": [],
    },
    "unknown in the submitter": {"op": "add", "path": "/spec/submitterPodTemplate/spec/container", "value": []},
    "string for a number": {"op": "replace", "path": f"{WORKERS}/maxReplicas", "value": "4"},
    "number for a string": {"op": "replace", "path": "/spec/rayClusterSpec/rayVersion", "value": 2.6},
    "number for a parameter": {
        "op": "replace",
        "path": "/spec/rayClusterSpec/headGroupSpec/rayStartParams/num-cpus",
        "value": 0,
    },
    "string for a truth": {"op": "replace", "path": "/spec/shutdownAfterJobFinishes", "value": "true"},
    "no quantity": {"op": "replace", "path": f"{WORKERS}/template/spec/volumes/0/emptyDir/sizeLimit", "value": "48 GB"},
    "no such version": {"op": "replace", "path": "/spec/rayClusterSpec/autoscalerOptions/version", "value": "v3"},
    "no such mode": {"op": "replace", "path": "/spec/rayClusterSpec/authOptions/mode", "value": "tokens"},
    "a group without a name": {"op": "remove", "path": f"{WORKERS}/groupName"},
    "a group without a limit": {"op": "remove", "path": f"{WORKERS}/maxReplicas"},
    "a container without a name": {"op": "remove", "path": f"{HEAD_POD}/containers/0/name"},
    "a mount without a path": {"op": "remove", "path": f"{HEAD_POD}/containers/0/volumeMounts/0/mountPath"},
    "a head without pods": {"op": "remove", "path": "/spec/rayClusterSpec/headGroupSpec/template"},
    "no spec": {"op": "remove", "path": "/spec"},
    "a port twice": {
        "op": "add",
        "path": f"{HEAD_POD}/containers/0/ports/-",
        "value": {"name": "again", "containerPort": 6379},
    },
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake: str, schemas: Schemas) -> None:
    broken = jsonpatch.apply_patch(manifest("base", "RayJob"), [MISTAKES[mistake]])
    found = faults(broken, schemas)
    assert len(found) == 1, found


def test_what_a_schema_leaves_open_stays_open() -> None:
    schema = {
        "type": "object",
        "properties": {
            "open": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "map": {"type": "object", "additionalProperties": {"type": "string"}},
            "closed": {"type": "object", "properties": {"a": {"type": "integer", "nullable": True}}},
        },
    }
    validator = Draft202012Validator(strict(schema))
    assert validator.is_valid({"open": {"x": [1]}, "map": {"x": "y"}, "closed": {"a": None}})
    assert not validator.is_valid({"map": {"x": 1}})
    assert not validator.is_valid({"closed": {"b": 1}})


# ---------------------------------------------------------------------------------------------------------------------
# As it promises


def gibibytes(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([GM]i)", quantity).groups()  # type: ignore[union-attr]
    return int(number) / (1 if unit == "Gi" else 1024)


def test_the_job_cleans_up_and_tries_again_from_storage_outside(variant: str) -> None:
    spec = manifest(variant, "RayJob")["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] > 0 and spec["backoffLimit"] > 0
    script, *options = shlex.split(spec["entrypoint"].removeprefix("python "))
    assert script == "/opt/raydali/jobs/imagenet.py"
    assert "COPY jobs /opt/raydali/jobs" in (ROOT / "cluster/Dockerfile").read_text()
    config = tyro.cli(Config, args=options)  # as the job itself would read them
    assert config.storage.startswith("s3://") and config.name, "a new cluster must find the run by its name"
    assert config.checkpoint_every and config.max_failures and config.gpu

    group = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    resources = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus, cpus = int(resources["nvidia.com/gpu"]), int(resources["cpu"])
    assert config.worker_range is not None and config.cpus_per_worker is not None
    assert config.worker_range == ((8, 8) if variant == "kueue" else (gpus, group["maxReplicas"] * gpus))
    assert group["maxReplicas"] * gpus == config.worker_range[1]
    assert config.cpus_per_worker * gpus <= cpus


def test_the_head_schedules_no_workers_and_workers_have_gpus(variant: str) -> None:
    for cluster in clusters(variant):
        head = cluster["headGroupSpec"]
        assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"
        assert head["serviceType"] == "ClusterIP" and "enableIngress" not in head
        (group,) = cluster["workerGroupSpecs"]
        pod = group["template"]["spec"]
        (worker,) = pod["containers"]
        assert worker["resources"]["limits"] == worker["resources"]["requests"]
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == "4"
        assert "nvidia.com/gpu" not in str(head)
        assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_shared_memory_holds_the_object_store_and_more(variant: str) -> None:
    for cluster in clusters(variant):
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = group["template"]["spec"]
            (container,) = pod["containers"]
            (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/dev/shm"]
            (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
            assert volume["emptyDir"]["medium"] == "Memory"
            size, memory = (
                gibibytes(volume["emptyDir"]["sizeLimit"]),
                gibibytes(container["resources"]["limits"]["memory"]),
            )
            store = int(group["rayStartParams"].get("object-store-memory", 0)) / 2**30 or 0.3 * memory  # Ray's default
            assert store < size < memory / 2
            if "object-store-memory" in group["rayStartParams"]:
                assert size - store >= 8 * int(container["resources"]["limits"]["nvidia.com/gpu"])  # NCCL, loaders


def test_a_token_is_needed(variant: str) -> None:
    for cluster in clusters(variant):
        assert cluster["authOptions"] == {"mode": "token", "secretName": "raydali-auth-token"}
    rendered = render(FOLDER / variant)
    assert not [each for each in rendered if each["kind"] == "Secret"], "no secret in a file"
    assert {each["kind"] for each in rendered} == {"ServiceAccount", *KINDS}
    assert not [container for container in containers(rendered) if "env" in container]


def test_nothing_runs_as_root(variant: str) -> None:
    pods = [manifest(variant, "RayJob")["spec"]["submitterPodTemplate"]["spec"]]
    for cluster in clusters(variant):
        groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        pods += [group["template"]["spec"] for group in groups]
    for pod in pods:
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] == context["runAsGroup"] == 1000
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    everything = render(FOLDER / variant)
    securities = [container["securityContext"] for container in containers(everything)]
    securities += [
        each["autoscalerOptions"]["securityContext"] for each in clusters(variant) if "autoscalerOptions" in each
    ]
    for security in securities:
        assert security == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert "USER 1000:1000" in (ROOT / "cluster/Dockerfile").read_text()


def test_pods_are_probed_and_end_in_order(variant: str) -> None:
    for cluster in clusters(variant):
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = group["template"]["spec"]
            (container,) = pod["containers"]
            for name in ("livenessProbe", "readinessProbe"):
                assert container[name]["httpGet"] == {"path": "/api/healthz", "port": 52365}
            assert container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"] == 600
            assert pod["terminationGracePeriodSeconds"] >= 60
            assert "command" not in container and "args" not in container  # else `ray start` were not process 1
            annotations = group["template"]["metadata"]["annotations"]
            assert annotations == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def test_what_runs_is_of_the_versions_in_the_lock(variant: str) -> None:
    ray = re.search(r"^ray==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert ray and all(cluster["rayVersion"] == ray[1] for cluster in clusters(variant))
    images = {container["image"] for container in containers(render(FOLDER / variant))}
    (tag,) = {image.rpartition(":")[2] for image in images}
    for cloud in ("aws", "gcp"):
        assert f"/raydali:{tag}\n" in (ROOT / f"cluster/{cloud}.yaml").read_text()


def test_autoscaling_is_v2_where_nobody_else_counts_machines() -> None:
    for variant in ("base", "volcano"):
        for cluster in clusters(variant):
            assert cluster["enableInTreeAutoscaling"] is True
            assert cluster["autoscalerOptions"]["version"] == "v2"
            assert cluster["autoscalerOptions"]["idleTimeoutSeconds"] == 300
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                assert group["template"]["spec"]["restartPolicy"] == "Never"  # v2's condition
    for cluster in clusters("base"):
        assert cluster["workerGroupSpecs"][0]["minReplicas"] == 0 < cluster["workerGroupSpecs"][0]["maxReplicas"]


def test_kueue_gets_a_fixed_number_of_machines_and_a_job_that_waits() -> None:
    for kind in KINDS:
        assert manifest("kueue", kind)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "raydali"
    assert manifest("kueue", "RayJob")["spec"]["suspend"] is True
    for cluster in clusters("kueue"):
        assert cluster["enableInTreeAutoscaling"] is False and "autoscalerOptions" not in cluster
        (group,) = cluster["workerGroupSpecs"]
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2
        assert "suspend" not in cluster


def test_volcano_gets_a_gang() -> None:
    for kind in KINDS:
        assert manifest("volcano", kind)["metadata"]["labels"]["volcano.sh/queue-name"] == "raydali"
    for cluster in clusters("volcano"):
        (group,) = cluster["workerGroupSpecs"]
        assert group["replicas"] == group["minReplicas"] == 2 < group["maxReplicas"]


def test_names_are_short_enough_for_kuberay() -> None:
    for kind in KINDS:
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", manifest("base", kind)["metadata"]["name"])
