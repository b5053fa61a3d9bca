"""Ray Train's backend that sets up and ends the processes of a worker group."""

import fcntl
import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import ray
import torch
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError

from raydali.run.compile_cache import enter_working_folder, use_node_folders

if TYPE_CHECKING:
    from ray.train._internal.base_worker_group import BaseWorkerGroup

VARIABLE = "GLOO_SOCKET_IFNAME"
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
    def on_start(self, worker_group: "BaseWorkerGroup", backend_config: TorchConfig) -> None:  # type: ignore[override]  # as Ray's
        try:
            worker_group.execute(_prepare_process)
            super().on_start(worker_group, backend_config)
        except ray.exceptions.RayTaskError as error:
            # For example, a connection was reset. Ray Train retries only after this type; the driver counts it.
            raise WorkerGroupStartupFailedError(f"the process group was not set up: {error}") from error

    def on_shutdown(self, worker_group: "BaseWorkerGroup", backend_config: TorchConfig) -> None:  # type: ignore[override]
        """Do nothing: the processes end anyway, and NCCL would wait 5 s for a dead one."""


def _prepare_process() -> None:
    """Prepare the process of a worker."""
    use_node_folders()
    enter_working_folder()
    if threads := os.environ.get("OMP_NUM_THREADS"):  # Ray has set it after PyTorch's import
        torch.set_num_threads(int(threads.split(",")[0]))
    listen_at_node_address()


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
