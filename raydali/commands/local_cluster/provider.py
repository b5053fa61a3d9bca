"""The provider of the nodes of a cluster on this machine, for Ray's autoscaler."""

import shutil
from typing import Any

from ray._private import ray_constants
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class LocalNodeProvider(FakeMultiNodeProvider):
    """Ray's provider, with a folder for the files of jobs on each node.

    Before its first process for a job, a node unpacks the job's `--working-dir`, and removes what is in its place. In a
    folder of all nodes, that is the working directory of processes on other nodes. They can then import nothing, and
    MKL, a part of torch, ends a process that has no working directory.
    """

    def _next_hex_node_id(self) -> str:
        node: str = super()._next_hex_node_id()  # type: ignore[no-untyped-call]
        ray_constants.DEFAULT_RUNTIME_ENV_DIR_NAME = f"runtime_resources_{node}"  # of the node that is created now
        return node

    def _terminate_node(self, node: dict[str, Any]) -> None:
        super()._terminate_node(node)  # type: ignore[no-untyped-call]
        shutil.rmtree(node["node"].get_runtime_env_dir_path(), ignore_errors=True)
