"""Chooses options for the machines of a worker group, and records facts about these machines.

These are versions, and cores, CPU, memory and GPUs of each node. Host names, addresses and environment variables are
not recorded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch

from raydali.host.cpu_times import usable_cores
from raydali.host.facts import versions
from raydali.host.hardware import cpu_facts, fastest_precision, has_bf16
from raydali.launch.defaults import HARDWARE_OPTIONS, Facts, Options, open_options, resolve
from raydali.launch.worker.session import Session
from raydali.run.events import OptionsChosen
from raydali.run.folder import CONFIG
from raydali.training.worker import Worker


def worker_environment(worker: Worker) -> dict[str, Any]:
    """Return {"node", "cores", "cpu", "memory", "gpu": name or None, "versions"} of this process; takes about 20 ms."""
    cpu, memory = cpu_facts().get("model name"), psutil.virtual_memory().total
    gpu = torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else None
    machine = {"cores": usable_cores(), "cpu": cpu, "memory": memory, "gpu": gpu}
    return {"node": worker.node, **machine, "versions": versions()}


def environment(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the environments of all workers.

    Returns:
        {"versions": {"torch": "2.15.0", ...}, "nodes": [{"node": "3f2a1b9c", "cores": 16, "cpu": model or None,
        "memory": bytes, "workers": 2, "gpu": name or None}, ...]}. Versions that differ among workers are separated by
        commas; None if no worker has the package.
    """
    names = dict.fromkeys(name for worker in workers for name in worker["versions"])
    versions = {name: sorted({worker["versions"].get(name, "") for worker in workers} - {""}) for name in names}
    nodes: dict[str, dict[str, Any]] = {}
    for worker in workers:
        shared = {name: worker[name] for name in ("node", "cores", "cpu", "memory")}
        of_node = nodes.setdefault(worker["node"], {**shared, "workers": 0, "gpu": set()})
        of_node["workers"] += 1
        of_node["gpu"] |= {worker["gpu"]} - {None}
    return {
        "versions": {name: ", ".join(numbers) or None for name, numbers in versions.items()},
        "nodes": [{**of_node, "gpu": ", ".join(sorted(of_node["gpu"])) or None} for of_node in nodes.values()],
    }


def resolve_on_hardware(options: Options, session: Session, *, samples: int) -> Options:
    """Return the options with those that depend on the hardware of all workers. All ranks must call it.

    Values that are not in `config.json` yet are written there and reported to the driver before training begins. A
    later worker group therefore uses the same values.

    Args:
        options: as the driver has resolved them.
        session: of this worker.
        samples: the number of training samples.

    Raises:
        StorageAway: the storage did not answer for a minute.
    """
    worker, folder, kept = session.worker, session.folder, dict[str, Any]()
    first, bf16 = worker.rank == 0, all(worker.exchange(has_bf16(worker.device)))
    if open_options(options, *HARDWARE_OPTIONS):
        if first:
            with folder.must_answer():
                kept = folder.read_json(CONFIG)
        kept = worker.from_first(kept)
        before = resolve(options, kept)
        options = resolve(before, kept, Facts(samples=samples, device=worker.device.type, bf16=bf16))
        values = {name: getattr(options, name) for name in HARDWARE_OPTIONS if hasattr(options, name)}
        new = {name: value for name, value in values.items() if value != getattr(before, name)}
        if first and new:
            with folder.must_answer():
                folder.write_json(CONFIG, kept | new)
            session.emit(OptionsChosen(options=new))
    if first and not bf16 and getattr(options, "precision", None) == "bf16":
        faster = fastest_precision(worker.device.type, bf16=False)
        session.warn(f"--precision bf16 is slow, since not every device here supports it: {faster} is faster")
    return options
