"""The samples of a run: those of its stream, and those in its trace."""

import numpy as np

from raydali.commands.chaos.accounting import Samples
from raydali.data.stream.stream import Stream
from raydali.run.folder import CONFIG, RunFolder
from raydali.run.sample_trace import read_samples


def due_and_trained(folder: RunFolder) -> tuple[Samples, Samples]:
    """Return the samples that a run has to train on, by its settings, and those that it trained on, by its trace."""
    settings = folder.read_json(CONFIG)
    names = "samples", "epochs", "batch_size", "global_batch_size", "seed", "shuffle_block", "shuffle_apart"
    stream = Stream(**{name: settings[name] for name in names}, shuffle_window=settings["shuffle_window"] or 0)
    batches = list(stream.micro_batches(0, 1))
    steps = np.repeat([batch.step for batch in batches], [len(batch.ids) for batch in batches])
    table = read_samples(folder)
    return (
        Samples(steps, np.concatenate([batch.ids for batch in batches])),
        Samples(table["step"].to_numpy(), table["id"].to_numpy()),
    )
