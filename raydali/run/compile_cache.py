"""Keeps what torch.compile has made: on the node for all runs, and in a run's folder for nodes that lack it.

~/.cache/raydali/compiled/          on the node: code of torch.compile, kernels of Triton and of CUDA
    inductor/raydali-*.json         the keys of the artifacts of a run's file, which are all there
~/.cache/raydali/working_folder/    the working folder of all workers on the node
STORAGE/NAME/compile_cache/GPU-0    of the workers on the first GPU of a node: a line of JSON, then torch's artifacts

Compiled code contains the number of its GPU, so each number has a file. Torch uses an artifact only for the same graph,
options, versions and kind of device. It contains code, so nobody else should be able to write to the storage.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from raydali.data.index.cache import cache_folder
from raydali.run import local_files
from raydali.run.folder import RunFolder
from raydali.training.worker import Worker

FOLDER = "compile_cache"
NODE_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
"""Variables that name the folders of compilers, and their folders on the node."""


def use_node_folders() -> None:
    """Let compilers keep what they make in the user's cache instead of `/tmp`, where the user has not set a folder.

    Call it before CUDA is used. If the user's cache cannot be written, nothing changes.
    """
    node = cache_folder() / "compiled"
    for variable, name in NODE_FOLDERS.items():
        try:
            (node / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        if os.access(node / name, os.W_OK):
            os.environ.setdefault(variable, str(node / name))


def enter_working_folder() -> None:
    """Change to a folder that is the same in all runs, if the user's cache can be written. Call it before CUDA is used.

    CUDA's cache finds kernels that cuDNN generates only in the working folder in which they were compiled. Ray Train
    gives each run another one, in which each start compiles them again, for 10 s with ResNet-50.
    """
    folder = cache_folder() / "working_folder"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)


class CompileCache:
    """The artifacts of torch.compile in a run's folder, for the device of this worker.

    Args:
        folder: the run's folder.
        worker: this worker.
        warn: called with a line of text if artifacts cannot be used or saved; the run goes on without them.

    Attributes:
        file: the name of their file in the run's folder.
    """

    def __init__(self, folder: RunFolder, worker: Worker, warn: Callable[[str], None]) -> None:
        self._folder, self._worker, self._warn = folder, worker, warn
        self.file = f"{FOLDER}/{_device_name(worker.device)}"
        self._loaded: set[str] = set()
        self._saves = False
        self._thread: threading.Thread | None = None

    def load(self) -> None:
        """Give torch what earlier workers of the run have compiled, before the first compilation. All ranks call it."""
        self._saves = self._worker.exchange(self.file).index(self.file) == self._worker.rank
        try:
            if not self._folder.exists(self.file):
                return
            line, _, artifacts = self._folder.read(self.file).partition(b"\n")
            header = json.loads(line)
            if header != _header(artifacts):
                raise ValueError("it is of another version of torch, or damaged")
            if (on_node := _keys_file(header)).exists():  # to replace what is there takes seconds
                self._loaded = set(json.loads(on_node.read_text()))
                return
            if (info := torch.compiler.load_cache_artifacts(artifacts)) is None:
                raise ValueError("torch cannot read it")
            self._loaded = _keys(info)
            _keep_keys(header, self._loaded)
        except Exception as error:  # whatever torch makes of it: the model is compiled instead
            self._warn(f"{self._folder}/{self.file} is not used, so the model is compiled again: {error}")

    def save(self) -> None:
        """Begin to save what was compiled, unless it was loaded. One rank per device saves."""
        if not self._saves:
            return
        saved = torch.compiler.save_cache_artifacts()
        if saved is not None and not (keys := _keys(saved[1])) <= self._loaded:
            write = partial(self._write, saved[0], keys)
            self._thread = threading.Thread(target=write, daemon=True, name="compile cache")
            self._thread.start()

    def finish(self) -> None:
        """Wait until the artifacts are saved."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, artifacts: bytes, keys: set[str]) -> None:
        header = _header(artifacts)
        try:
            self._folder.write(self.file, json.dumps(header).encode() + b"\n" + artifacts)
            _keep_keys(header, keys)
        except Exception as error:  # of this thread; a worker group that was replaced learns it at its next checkpoint
            self._warn(f"{self._folder}/{self.file} cannot be written, so a new node compiles the model: {error}")


def _header(artifacts: bytes) -> dict[str, str]:
    return {"torch": torch.__version__, "sha256": hashlib.sha256(artifacts).hexdigest()}


def _keys_file(header: Mapping[str, str]) -> Path:
    """Return the file with the keys of the artifacts with this header, which this node has if the file exists."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.devnull), f"raydali-{header['sha256']}.json")


def _keep_keys(header: Mapping[str, str], keys: set[str]) -> None:
    with suppress(OSError):  # then they are loaded again
        local_files.replace(_keys_file(header), json.dumps(sorted(keys)).encode())


def _keys(info: "torch.compiler._cache.CacheInfo") -> set[str]:
    return {key for keys in info.artifacts.values() for key in keys}


def _device_name(device: torch.device) -> str:
    """Return the name of a file for this device: kind and number."""
    if device.type == "cpu":
        return f"cpu-{torch.backends.cpu.get_cpu_capability()}"
    return re.sub(r"\W+", "-", torch.cuda.get_device_name(device)) + f"-{device.index or 0}"
