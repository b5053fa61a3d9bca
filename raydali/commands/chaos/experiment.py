"""The whole of it: a cluster, an undisturbed run, a disturbed one, and the accounts."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from raydali.commands.chaos import leaks
from raydali.commands.chaos.accounting import FaultOutcome, Losses, Samples, lost_and_repeated, shares
from raydali.commands.chaos.faults import FAULTS, Stage, suffer, wait_until_training
from raydali.commands.chaos.nodes import Nodes
from raydali.commands.chaos.run import WatchedRun
from raydali.commands.chaos.virtual_hosts import Host, hosts, small_disk
from raydali.commands.local_cluster.head import Ports
from raydali.data.stream.stream import Stream
from raydali.host.processes import command_line
from raydali.host.started_jobs import heed_sigterm, job_script
from raydali.run.folder import CONFIG, EPOCHS, RunFolder
from raydali.run.sample_trace import read_samples

BATCH_SIZE = 16
CHECKPOINT_EVERY = 20
HANG_SECONDS = 15
DISK_MEGABYTES = 128
FINISH_SECONDS = 900.0


class ChaosExperiment:
    """One run of `raydali chaos`.

    Args:
        faults: what happens, in order.
        nodes: of the cluster.
        epochs: of the run.
        say: takes a line of what is going on.
    """

    def __init__(self, faults: Sequence[str], *, nodes: int, epochs: int, say: Callable[[str], None]) -> None:
        self._left_out = {name: why for name in faults if (why := FAULTS[name].why_not())}
        self._faults = [name for name in faults if name not in self._left_out]
        self._nodes, self._epochs, self._say = nodes, epochs, say
        self._job = job_script("imagenet.py", "raydali chaos")

    def run(self) -> dict[str, Any]:
        """Do it all; what was found, see command.py.

        Raises:
            CommandFailed: the cluster or a run does not start, or does not go on.
        """
        for name, why in self._left_out.items():
            self._say(f"{name} is left out: {why}")
        heed_sigterm()
        memory = leaks.shared_memory()
        with tempfile.TemporaryDirectory(prefix="raydali-chaos-", dir="/tmp") as temporary, ExitStack() as stack:
            folder = Path(temporary)
            members = stack.enter_context(hosts(self._nodes))
            disk = stack.enter_context(small_disk(folder / "disk", megabytes=DISK_MEGABYTES))
            nodes = Nodes(members, ports=Ports.checked(0, 0, 0), folder=folder, temp_dir=folder / "ray")
            runs = [
                WatchedRun(
                    self._command(members[0], RunFolder(str(disk.path), name)),
                    RunFolder(str(disk.path), name),
                    folder / f"{name}.log",
                    cwd=self._job.parents[1],
                    env={**nodes.env, "RAY_ADDRESS": nodes.address},
                )
                for name in ("undisturbed", "disturbed")
            ]
            undisturbed, disturbed = runs
            occupied: set[int] = set()
            try:
                for i in range(self._nodes):
                    nodes.start(i)
                self._say(f"{self._nodes} nodes are up; the undisturbed run begins")
                undisturbed.start()
                undisturbed.finish(FINISH_SECONDS)
                suffered = self._disturb(Stage(nodes, disturbed, disk))
                occupied = leaks.ports_of(nodes.processes(i) for i in range(self._nodes))
            finally:
                for run in runs:
                    run.kill()
                processes = nodes.end()
            ports_left = sorted(set().union(*(host.listening() for host in members)) & occupied)
            found = self._accounts(undisturbed.folder, disturbed.folder, suffered)
        return found | {
            "left": {
                "processes": [command_line(each)[:80] for each in processes],
                "ports": ports_left,
                "shared_memory": sorted(leaks.shared_memory() - memory),
            }
        }

    def _disturb(self, stage: Stage) -> list[FaultOutcome]:
        run = stage.run
        run.start()
        suffered: list[FaultOutcome] = []
        last = 0
        for name in self._faults:
            wait_until_training(run, stage, beyond=last, every=CHECKPOINT_EVERY)
            self._say(f"{name}: {FAULTS[name].what}")
            cost = suffer(name, stage)
            suffered.append(cost)
            last = max(run.committed(), cost.resumed_at or 0)
            noticed = f"noticed after {cost.noticed - cost.at:.1f} s ({cost.noticed_by})"
            self._say(f"{name}: {noticed}, training goes on after {cost.resumed - cost.at:.1f} s")
        self._say("the last of them; the run goes on to its end")
        run.finish(FINISH_SECONDS)
        return suffered

    def _command(self, host: Host, folder: RunFolder) -> list[str]:
        options = ["--storage", folder.uri_of_storage, "--name", folder.name, "--workers", f"1:{self._nodes}"]
        options += ["--cpus-per-worker", "1", "--batch-size", str(BATCH_SIZE), "--epochs", str(self._epochs)]
        options += ["--global-batch-size", str(BATCH_SIZE * self._nodes), "--checkpoint-every", str(CHECKPOINT_EVERY)]
        options += ["--hang-timeout", str(HANG_SECONDS), "--trace-samples", "--no-ceiling", "--no-gpu"]
        return host.command([sys.executable, str(self._job), *options])

    def _accounts(
        self, undisturbed: RunFolder, disturbed: RunFolder, suffered: Sequence[FaultOutcome]
    ) -> dict[str, Any]:
        settings = disturbed.read_json(CONFIG)
        names = ("samples", "epochs", "batch_size", "global_batch_size", "seed", "shuffle_block")
        stream = Stream(**{name: settings[name] for name in names}, shuffle_window=settings["shuffle_window"] or 0)
        reference, committed = _of_stream(stream), _of_run(disturbed)
        rows = []
        for each, (low, high) in zip(suffered, shares(suffered, stream.steps), strict=True):
            lost, repeated = lost_and_repeated(reference, committed, low, high)
            rows.append(
                {
                    "fault": each.fault,
                    "noticed_seconds": round(each.noticed - each.at, 2),
                    "noticed_by": each.noticed_by,
                    "resumed_seconds": round(each.resumed - each.at, 2),
                    "repeated_steps": each.repeated_steps,
                    "lost": lost,
                    "repeated": repeated,
                }
            )
        losses = Losses(*([row["loss"] for row in each.rows(EPOCHS)] for each in (undisturbed, disturbed)))
        return {
            "left_out": self._left_out,
            "rows": rows,
            "same_stream": bool(np.array_equal(reference.ids, committed.ids)),
            "losses": {**asdict(losses), "largest_difference": losses.largest, "agree": losses.agree},
        }


def _of_stream(stream: Stream) -> Samples:
    batches = list(stream.micro_batches(0, 1))
    steps = np.repeat([batch.step for batch in batches], [len(batch.ids) for batch in batches])
    return Samples(steps, np.concatenate([batch.ids for batch in batches]))


def _of_run(folder: RunFolder) -> Samples:
    table = read_samples(folder)
    return Samples(table["step"].to_numpy(), table["id"].to_numpy())
