"""cluster/aws.yaml and cluster/gcp.yaml as Python's objects."""

from typing import Any

import yaml
from ray.autoscaler._private.util import prepare_config

from tests.support.cluster import ROOT

CLOUDS = ("aws", "gcp")


def text(cloud: str) -> str:
    return (ROOT / f"cluster/{cloud}.yaml").read_text()


def load(cloud: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(text(cloud))
    return config


def prepared(cloud: str) -> dict[str, Any]:
    """As Ray fills it in before it asks the cloud for anything."""
    config: dict[str, Any] = prepare_config(load(cloud))
    return config
