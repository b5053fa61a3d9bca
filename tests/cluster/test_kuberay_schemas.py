"""cluster/kuberay/ held against KubeRay's own schemas, unknown fields refused.

The schemas are CustomResourceDefinitions in YAML, in the folder that KUBERAY_CRDS names: KubeRay ships them in its Helm
chart's crds/. Without them these tests skip, and say so; KubeRay's rules in CEL are not evaluated.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.support.manifests import KINDS, VARIANTS, Manifest, manifest

if not os.environ.get("KUBERAY_CRDS"):
    pytest.skip("needs KubeRay's CRDs: KUBERAY_CRDS names no folder", allow_module_level=True)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
    folder = os.environ["KUBERAY_CRDS"]
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
    "unknown in the cluster": {"op": "add", "path": "/spec/rayClusterSpec/autoscalerOption", "value": {}},
    "unknown in a pod": {"op": "add", "path": f"{HEAD_POD}/nodeSelectors", "value": {}},
    "unknown in a probe": {"op": "add", "path": f"{HEAD_POD}/containers/0/livenessProbe/httpGet/url", "value": "/"},
    "string for a number": {"op": "replace", "path": f"{WORKERS}/maxReplicas", "value": "4"},
    "no quantity": {"op": "replace", "path": f"{WORKERS}/template/spec/volumes/0/emptyDir/sizeLimit", "value": "48 GB"},
    "no such version": {"op": "replace", "path": "/spec/rayClusterSpec/autoscalerOptions/version", "value": "v3"},
    "a group without a name": {"op": "remove", "path": f"{WORKERS}/groupName"},
    "a container without a name": {"op": "remove", "path": f"{HEAD_POD}/containers/0/name"},
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
