"""Runs the training function of a job in a worker of Ray Train, and reports to the driver how it failed.

Options that depend on the hardware of all workers are chosen here. Of the machines, versions are recorded, and cores,
CPU, memory and GPUs of each node; no host names, addresses or environment variables.
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil
import ray
import torch

from raydali.data.index.source import class_labels
from raydali.data.load.loader import Loader
from raydali.data.read.reading import retries
from raydali.errors import NodeError, RaydaliError, StorageAway, UsageError
from raydali.host import start_clock
from raydali.host.checks import failed_checks
from raydali.host.cpu_times import usable_cores
from raydali.host.facts import GpuEnergy, kernel_sees_gpu, versions
from raydali.host.hardware import cpu_facts, fastest_precision, has_bf16
from raydali.launch.channel import Interrupted
from raydali.launch.job import WorkerTask
from raydali.launch.worker.reporting import HeartbeatThread, forwarded_warnings
from raydali.launch.worker.run_meter import RankMetrics
from raydali.launch.worker.session import Cursor, Session
from raydali.launch.worker.shared_cache import shared_cache
from raydali.measure.memory import OUT_OF_MEMORY
from raydali.options.defaults import HARDWARE_OPTIONS, Facts, Options, open_options, resolve
from raydali.run.attempt import Attempt
from raydali.run.events import OptionsChosen
from raydali.run.folder import CONFIG
from raydali.run.ledger import group_id
from raydali.run.messages import EndsEarly, ForwardedWarning, RankWarning, WorkerError
from raydali.text import plural
from raydali.training.worker import Worker


def run_worker(config: dict[str, Any]) -> None:
    """Run the job's training function in a Ray Train worker. Report an error to the driver before raising it.

    Args:
        config: the reference to the WorkerTask as "task", and the number of the worker group as "group".
    """
    from ray.train import get_context  # not before: it takes seconds

    task: WorkerTask = ray.get(config["task"])
    channel, options, group = task.channel, task.options, config["group"]
    rank, context = get_context().get_world_rank(), ray.get_runtime_context()
    session: Session | None = None
    energy: GpuEnergy | None = None
    heartbeat = HeartbeatThread(  # the start of the session may hang, too
        channel.post,
        lambda: Loader.batches_taken + retries(),
        lambda: session.progress() if session is not None else 0.0,
        min(timeout / 2 or float("inf") for timeout in (options.hang_timeout, options.start_timeout)),
        joules=lambda: energy.joules() if energy is not None else None,
        node=context.get_node_id()[:8],
        rank=rank,
        group=group,
        node_id=context.get_node_id(),
    )
    try:
        session = _join(task, group)
        if session.worker.device.type == "cuda":
            energy = GpuEnergy(str(torch.cuda.get_device_properties(session.worker.device).uuid))
        if session.worker.device.type == "cuda" and get_context().get_local_rank() == 0:
            for text in failed_checks():
                session.warn(text)
        with forwarded_warnings(lambda text: channel.post(ForwardedWarning(rank, text))):
            data = ray.get(task.data)
            if options.class_sampling is not None:
                session.class_labels = class_labels(data.train)
            address = ray.util.get_node_ip_address()
            with shared_cache(options.cache, session.worker, address, (data.train, data.val), session.warn):
                task.train(resolve_on_hardware(options, session, samples=task.samples), data, session)
            if session.steps_left:
                steps = plural(session.steps_left, "step")
                raise UsageError(f"the job's train function returned {steps} early: iterate over all `run.steps`")
            session.checkpoints.finish()
            if session.early_end is not None and rank == 0:
                channel.post_and_wait(EndsEarly(session.early_end))
        heartbeat.close()
    except Interrupted:
        raise
    except BaseException as error:
        cursor = session.cursor if session is not None else Cursor()
        step = cursor.done if cursor.done > cursor.start else 0
        message = worker_error(error, rank=rank, step=step, group=group, node_id=context.get_node_id())
        channel.post_and_wait(message)
        raise


def _join(task: WorkerTask, group: str) -> Session:
    """Join the other workers of a group, take the run's folder over for it, and return this rank's session."""
    from ray.train.v2._internal.execution.context import get_train_context  # the public API waits for all ranks

    start_clock.mark("worker start")
    context, channel, options = ray.get_runtime_context(), task.channel, task.options
    cpus, node = int(context.get_assigned_resources().get("CPU", 1)), context.get_node_id()[:8]
    worker = Worker.join(_device(), cpus=cpus, node=node, timeout=options.group_timeout)
    folder = replace(task.folder, warn=lambda text: channel.post(RankWarning(worker.rank, text)))
    number = 0
    if worker.rank == 0:
        number = channel.next_group()
        with folder.must_answer():
            Attempt(task.attempt, number).take(folder)
    attempt = Attempt(task.attempt, worker.from_first(number))
    start_clock.mark("process group")
    machines = environment(worker.gather(worker_environment(worker)))
    if attempt.group == 1:
        start_clock.join(task.marks)
    return Session(
        worker,
        attempt.fenced(folder),
        channel,
        get_train_context(),
        environment=machines,
        weights=lambda: ray.get(task.weights),
        is_kept=options.kept_steps(task.samples),
        export=RankMetrics(folder.name, worker.rank, worker.device).publish,
        group=group_id(task.attempt, group),
        short_seconds=task.short_seconds,
    )


def _device() -> torch.device:
    """Return the device that Ray Train gave this worker; the CPU if GPUs are declared but none exists.

    Raises:
        RuntimeError: there is a GPU that CUDA does not find, for example because it has failed.
    """
    from ray.train.torch import get_device

    device: torch.device = get_device()
    if device.type != "cuda" or torch.cuda.is_available():
        return device
    if kernel_sees_gpu():
        raise RuntimeError("CUDA finds no GPU in this process, though the node has one: see `nvidia-smi` there")
    return torch.device("cpu")


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
        values = {name: getattr(options, name) for name in HARDWARE_OPTIONS}
        new = {name: value for name, value in values.items() if value != getattr(before, name)}
        if first and new:
            with folder.must_answer():
                folder.write_json(CONFIG, kept | new)
            session.emit(OptionsChosen(options=new))
    if first and not bf16 and options.precision == "bf16":
        faster = fastest_precision(worker.device.type, bf16=False)
        session.warn(f"--precision bf16 is slow, since not every device here supports it: {faster} is faster")
    return options


def worker_error(error: BaseException, *, rank: int, step: int, group: str, node_id: str) -> WorkerError:
    """Describe an error for the driver, with the traceback outside libraries; errors of raydali have none.

    The step is 0 if this worker group has done none yet.
    """
    if isinstance(error, torch.OutOfMemoryError) and not step:
        instead = "give a smaller one or a smaller --batch-size, or --shard with several GPUs"
        error = UsageError(f"the model {OUT_OF_MEMORY} before the first step: {instead}")
    passing = isinstance(error, StorageAway | NodeError)
    ours = isinstance(error, RaydaliError)
    frames = traceback.extract_tb(error.__traceback__)[1:]
    outside = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return WorkerError(
        rank=rank,
        group=group,
        step=step,
        node_id=node_id,
        error=str(error) if ours else "".join(traceback.format_exception_only(error)).strip(),
        traceback="" if ours else "".join(traceback.format_list(outside)),
        usage=isinstance(error, UsageError),
        final=ours and not passing,
        storage=isinstance(error, StorageAway),
        node_fault=isinstance(error, NodeError),
    )
