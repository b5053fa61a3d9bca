"""Hardware and versions of this host, found without torch, CUDA and GPU memory."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("ray", "torch", "torchvision", "nvidia-dali-cuda120", "raydali")
"""Packages whose versions must be the same on all nodes."""
NVJPEG, NVDEC = "libnvjpeg.so.12", "libnvcuvid.so.1"
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU of the host, even if this process may not use it; memory is in bytes."""

    name: str
    free: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Host:
    """The facts about a host.

    Attributes:
        driver: version of NVIDIA's driver; empty if there is none.
        gpus: the GPUs that the driver reports.
        nvjpeg, nvdec: the error of loading the library, without which DALI decodes no JPEGs or videos on GPUs; empty if
            it loads.
        cuda: the version of CUDA that torch was built for, for example 13.2; DALI may use another one.
        shared_memory: size of /dev/shm in bytes.
        open_files: the hard limit of open files per process; Ray raises the soft limit to it.
        versions: versions of Python and of PACKAGES; empty for one that is not installed.
    """

    name: str
    driver: str
    gpus: tuple[Gpu, ...]
    nvjpeg: str
    nvdec: str
    cuda: str
    shared_memory: int
    open_files: int
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        """Return whether there is a GPU, even one with only a file /dev/nvidia*, which NVML does not list."""
        return bool(self.gpus) or kernel_sees_gpu()


def this_host() -> Host:
    """Describe the host of this process."""
    driver, gpus = driver_and_gpus()
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Host(
        name=socket.gethostname(),
        driver=driver,
        gpus=gpus,
        nvjpeg=_nvjpeg_error(),
        nvdec=_loading_error(NVDEC),
        cuda=_cuda_of_torch(),
        shared_memory=_shared_memory(),
        open_files=2**31 if open_files == resource.RLIM_INFINITY else open_files,
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES without importing them; empty if a package is not installed."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def _nvjpeg_error() -> str:
    try:
        files = importlib.metadata.files("nvidia-nvjpeg-cu12") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    places = [str(file.locate()) for file in files if file.name == NVJPEG]
    return _loading_error(*places, NVJPEG)


def _loading_error(*libraries: str) -> str:
    error = ""
    for library in libraries:
        try:
            ctypes.CDLL(library)
            return ""
        except OSError as reason:
            error = str(reason)
    return error


def driver_and_gpus() -> tuple[str, tuple[Gpu, ...]]:
    """Return the driver's version and its GPUs, from NVML; both are empty if no driver answers.

    NVML lists all GPUs, independent of CUDA_VISIBLE_DEVICES.
    """
    import pynvml as nvml

    driver, gpus = "", list[Gpu]()
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            driver = nvml.nvmlSystemGetDriverVersion()
            for handle in map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                gpus.append(Gpu(name=nvml.nvmlDeviceGetName(handle), free=memory.free, total=memory.total))
        finally:
            nvml.nvmlShutdown()
    return driver, tuple(gpus)


class GpuEnergy:
    """The energy that a GPU has used since this object was made, by NVML's counter; 0.1 ms a reading.

    Args:
        uuid: the GPU's, as PyTorch gives it.
    """

    def __init__(self, uuid: str) -> None:
        import pynvml as nvml

        self._nvml, self._handle, self._before = nvml, None, 0.0
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self._before = self._read() or 0.0

    def joules(self) -> float | None:
        """Return the energy in joules; None if the driver does not count it, as of a part of a GPU."""
        now = self._read()
        return None if now is None else now - self._before

    def _read(self) -> float | None:
        if self._handle is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        except self._nvml.NVMLError:
            return None


def gpu_serial(uuid: str) -> str:
    """Return a GPU's serial number in words, or else its UUID, which PyTorch gives."""
    import pynvml as nvml

    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        return f"serial number {nvml.nvmlDeviceGetSerial(nvml.nvmlDeviceGetHandleByUUID(f'GPU-{uuid}'))}"
    return f"UUID {uuid}"


def kernel_sees_gpu() -> bool:
    """Return whether there is a file /dev/nvidia*, also if CUDA finds no GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _cuda_of_torch() -> str:
    """Return CUDA's version from torch's version.py, since importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    match = re.search(r"^cuda\b[^=]*= '([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return match[1] if match else ""


def _shared_memory() -> int:
    try:
        size = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return size.f_blocks * size.f_frsize


def version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
