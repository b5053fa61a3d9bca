"""cluster/kuberay/ as manifests: the little of kustomize that is used there."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

from tests.support.cluster import ROOT

FOLDER = ROOT / "cluster/kuberay"
VARIANTS = ("base", "kueue", "volcano")
KINDS = ("RayJob", "RayCluster")
Manifest = dict[str, Any]


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
