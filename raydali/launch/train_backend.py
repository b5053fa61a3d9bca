"""Ray Train's trainer and its backend: how the processes of a worker group are set up and end."""

import asyncio
import fcntl
import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2.torch.torch_trainer import TorchTrainer

from raydali.run.compile_cache import enter_working_folder, use_node_folders

if TYPE_CHECKING:
    from ray.train import Result
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2.api.callback import RayTrainCallback

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


class Trainer(TorchTrainer):
    """A TorchTrainer whose controller runs in this process: as an actor, it would start three processes per group."""

    def _create_default_callbacks(self) -> "list[RayTrainCallback]":
        """Leave out what only starts further processes: for Ray's data sets, and to clean up after a controller.

        Where this process ends, the driver ends, too, and Ray then removes the workers' placement group.
        """
        unused = DatasetsCallback, PlacementGroupCleanerCallback
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, unused)]

    def _initialize_and_run_controller(self, **arguments: Any) -> "Result":
        controller = TrainController(**arguments)
        asyncio.run(controller.run())
        return controller.get_result()


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
    def on_start(self, worker_group: "WorkerGroup", backend_config: TorchConfig) -> None:  # type: ignore[override]  # as Ray's
        try:
            worker_group.execute(_prepare_process)
            super().on_start(worker_group, backend_config)
        except ray.exceptions.RayTaskError as error:  # for example, a connection was reset
            raise RuntimeError(f"the process group was not set up: {error}") from error

    def on_shutdown(self, worker_group: "WorkerGroup", backend_config: TorchConfig) -> None:  # type: ignore[override]  # noqa: ARG002
        """End the processes of a group that failed: Ray would wait 5 s for one that cannot answer, and NCCL, too."""
        status = worker_group.get_latest_poll_status()
        if status is None or status.errors or not status.finished:
            for worker in worker_group.get_workers():
                ray.kill(worker.actor)


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
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(answer[20:24])
    return None
