"""Ray Train's backend that sets up and ends the processes of a worker group."""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import ray
import torch
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raydali.launch.controller.replacement import MEMBER, STORE
from raydali.run.compile_cache import enter_working_folder, use_node_folders
from raydali.train.membership import Membership

if TYPE_CHECKING:
    from ray.train._internal.base_worker_group import BaseWorkerGroup

VARIABLE = "GLOO_SOCKET_IFNAME"
GPUS = "CUDA_VISIBLE_DEVICES"
_SIOCGIFADDR = 0x8915


class WorkerProcesses(TorchConfig):
    """A TorchConfig whose workers listen at their node's address, and end at once.

    By default gloo listens at the address that the host's name resolves to. On many hosts this is 127.0.0.1 or
    127.0.1.1: workers on other nodes then try to connect to themselves, and time out.
    """

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        """The backend class, which Ray Train sets up the workers with."""
        return _Backend


class _Backend(_TorchBackend):
    def __init__(self) -> None:
        self._gpus: dict[str, str] = {}

    def on_start(self, worker_group: "BaseWorkerGroup", backend_config: TorchConfig) -> None:  # type: ignore[override]  # as Ray's
        member = os.environ[MEMBER] if isinstance(worker_group, ReplicaGroup) else None
        try:
            gpus = worker_group.execute(_prepare_process, os.environ.get(STORE), member, self._gpus)
            if member is None:
                self._gpus = dict(gpus)
                super().on_start(worker_group, backend_config)
        except ray.exceptions.RayTaskError as error:
            # For example, a connection was reset. Ray Train retries only after this type; the driver counts it.
            raise WorkerGroupStartupFailedError(f"the process group was not set up: {error}") from error

    def on_shutdown(self, worker_group: "BaseWorkerGroup", backend_config: TorchConfig) -> None:  # type: ignore[override]
        """Do nothing: the processes end anyway, and NCCL would wait 5 s for a dead one."""


def _prepare_process(store: str | None, member: str | None, gpus: Mapping[str, str]) -> tuple[str, str]:
    """Prepare the process of a worker.

    Args:
        store: the address of the store in which the ranks agree; None: they need none.
        member: the name of a worker that replaces a lost one, and joins the others when it is prepared.
        gpus: the GPUs that the first workers on each node saw. Ray Train shows a replacement only its own one, over
            which NCCL would not reach the others directly.

    Returns:
        The node, and its GPUs that this worker sees.
    """
    node, own = ray.get_runtime_context().get_node_id(), os.environ.get(GPUS, "")
    if member is not None and (seen := gpus_to_see(own, gpus.get(node, ""))):
        os.environ[GPUS] = seen
    if store is not None:
        os.environ[STORE] = store
    if member is not None:
        os.environ[MEMBER] = member
    use_node_folders()
    enter_working_folder()
    if threads := os.environ.get("OMP_NUM_THREADS"):  # Ray has set it after PyTorch's import
        torch.set_num_threads(int(threads.split(",")[0]))
    listen_at_node_address()
    return node, os.environ.get(GPUS, "")


def gpus_to_see(own: str, of_first_workers: str) -> str:
    """Return the GPUs that a replacement sees: those of the first workers on its node, if its own one is among them."""
    return of_first_workers if own in of_first_workers.split(",") else own


def membership_of(number: int, world_size: int, timeout: timedelta, device: torch.device) -> Membership | None:
    """Return this worker's membership of its group; None if no worker is replaced.

    Args:
        number: Ray Train's number of this worker; those from `world_size` on are spares.
        world_size: number of the ranks that train.
        timeout: see Membership.
        device: see Membership.
    """
    if (address := os.environ.get(STORE)) is None:
        return None
    host, _, port = address.rpartition(":")
    store = partial(TCPStore, host, int(port), is_master=False)
    name = os.environ.get(MEMBER, str(number) if number >= world_size else None)
    return Membership(store, min(number, world_size - 1), world_size, name=name, timeout=timeout, device=device)


def listen_at_node_address() -> None:
    """Make gloo use the network interface with the node's address, unless the user has set another one."""
    address = ray.util.get_node_ip_address()
    for _, interface in socket.if_nameindex():
        if _address(interface) == address:
            os.environ.setdefault(VARIABLE, interface)


def _address(interface: str) -> str | None:
    """Return the IPv4 address of an interface, if it has one. The addresses of Ray's nodes are IPv4 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(found[20:24])
    return None
