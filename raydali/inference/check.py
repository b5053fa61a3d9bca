"""Check that the network of a job computes what the run computed, before anything is done with it.

A run keeps some samples of its validation (training/evaluation/reference.py): files, the loader's inputs, and outputs.

    file --> input       with val_pipeline(config), where the run's data can be read
    input --> outputs    with network(model, config), on whatever machine
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.functional import avg_pool2d

from raydali.data.index.source import Source
from raydali.data.stream.stream import Once
from raydali.errors import CommandError, RaydaliError, StorageAway
from raydali.extras import default_loader
from raydali.inference.trained_run import TrainedRun
from raydali.run.folder import EPOCHS
from raydali.text import error_line, plural
from raydali.training.evaluation.reference import Reference, files_of, raw_outputs, sha256

OUTPUT_LIMIT = 2e-4
"""Largest difference of outputs, as a share of the largest output. Between a CPU and a GPU it was at most 1.2e-5 for
15 networks; a mean that is off by 0.02 made at least 2.8e-3."""
INPUT_LIMITS = {"cpu": (1, 0.5, 2.0), "cuda": (8, 1.0, 255.0)}
"""By the device that decoded the run's inputs: side of the squares whose means are compared, in pixels, as filters
round differently on a GPU; largest mean difference, and largest single one, of 255. The mean difference of noise that a
GPU had resized was 0.25, and 1.9 where it was moved by a pixel."""
EQUAL = 1e-6
"""Difference of a figure from the run's, as a share of it if it is above 1, up to which both are called the same."""


class Checked(NamedTuple):
    """The result of a check that did not refuse the network.

    Attributes:
        text: one sentence.
        same_data: whether the validation samples are the run's; None if that is not known.
    """

    text: str
    same_data: bool | None = None


def check_run(run: TrainedRun, network: nn.Module, *, own_data: bool, unchecked: bool) -> Checked:
    """Compare a network with what its run computed.

    Args:
        run: the run.
        network: `run.network`, on the CPU.
        own_data: whether the validation samples of the job must be those that the run validated.
        unchecked: whether to go on if they are not, or it computes something else; the result says so.

    Raises:
        CommandError: so it is; the message says what differs most likely.
    """
    try:
        checked = _check(run, network)
        if own_data and checked.same_data is False:
            likely = "the data have changed, or train() validates other samples than open_data(config) has"
            raise _refused(run, checked.text, likely)
    except CommandError as error:
        if not unchecked:
            raise
        return Checked(f"unchecked: {error}")
    return checked


def beside_run(run: TrainedRun, metrics: Mapping[str, Any]) -> str:
    """Return in one sentence how figures compare with those that the run measured with these weights."""
    rows = [row for row in run.folder.rows(EPOCHS) if row["step"] == run.weights.step]
    if not rows or rows[-1]["validation"] is None:
        return ""
    validation = rows[-1]["validation"].items()
    measured = {name: value for name, value in validation if name in metrics and isinstance(value, int | float)}
    where = f"the run measured in epoch {rows[-1]['epoch']}"
    if all(abs(metrics[name] - value) <= EQUAL * max(1.0, abs(value)) for name, value in measured.items()):
        return f"the same as {where}"
    others = ", ".join(f"{name} {value:.6g}" for name, value in measured.items())
    return f"{where}, in {run.config.precision or 'fp32'} on its hardware: {others}"


def _check(run: TrainedRun, network: nn.Module) -> Checked:
    reference = run.weights.reference
    if reference is None:
        return Checked(f"not checked: {run.weights.origin} has no samples of a validation")
    if reference.facts.get("weights", run.weights.sha256) != run.weights.sha256:
        raise _refused(run, "has other weights than the run validated", f"{run.weights.origin} has changed since")
    _check_outputs(run, network, reference)
    samples = plural(len(reference.inputs), "validation sample")
    try:
        val = run.data.val
    except (RaydaliError, OSError) as error:
        return Checked(f"checked on {samples}, but not their files, which cannot be read: {error_line(error)[:80]}")
    if (len(val), val.fingerprint) != (reference.facts["samples"], reference.facts["fingerprint"]):
        return Checked(
            f"checked on {samples}, but not their files: the validation set has {len(val):,} samples, and is not the "
            f"run's, of {reference.facts['samples']:,}",
            same_data=False,
        )
    if reference.facts["input"] not in run.pipeline.outputs:
        return Checked(f"checked on {samples}, but not their files, since the job's code changes them", same_data=True)
    _check_inputs(run, val, reference)
    return Checked(f"checked on {samples}: files, inputs and outputs are as in the run", same_data=True)


def _check_outputs(run: TrainedRun, network: nn.Module, reference: Reference) -> None:
    where = f"the network of {run.file.name}"
    likely = "train() validates something else than network(model, config)"
    if run.unchanged is False:
        likely = f"{run.file.name} has changed since the run"
    try:
        ours = raw_outputs(network, reference.inputs)
    except Exception as error:  # whatever another network raises
        raise _refused(run, f"{where} does not take what the run's did ({error_line(error)[:60]})", likely) from error
    if [output.shape for output in ours] != [output.shape for output in reference.outputs]:
        raise _refused(run, f"the outputs of {where} have other shapes than the run's", likely)
    for one, other in zip(ours, reference.outputs, strict=True):
        largest, scale = (one - other).abs().max().item(), other.abs().max().item()
        if not largest <= OUTPUT_LIMIT * scale + 1e-6:
            differ = f"{where} does not compute what the run computed: outputs up to {scale:.3g} differ by"
            raise _refused(run, f"{differ} {largest:.2g}", likely)


def _check_inputs(run: TrainedRun, val: Source, reference: Reference) -> None:
    ids, kept, name = reference.facts["ids"], reference.inputs, reference.facts["input"]
    for id, hashes in zip(ids, reference.facts["files"], strict=True):
        if hashes and [*map(sha256, files_of(val, id))] not in ([], hashes):
            raise _refused(run, f"{val.path(id)} is not what the run validated", "the file has changed since")
    likely = "val_pipeline(config) is not what train() gives to run.loaders"
    try:
        with run.make_loader(default_loader(), val, run.pipeline, Once([(id, 0) for id in ids])) as loader:
            inputs = next(iter(loader))[name]
    except StorageAway:
        raise
    except Exception as error:  # of decoders
        raise _refused(run, f"{val.path(ids[0])} cannot be decoded ({error_line(error)[:60]})", likely) from error
    if inputs.shape != kept.shape:
        why = f"becomes {tuple(inputs.shape[1:])}, and was {tuple(kept.shape[1:])}"
        raise _refused(run, f"the input for {val.path(ids[0])} {why}", likely)
    side, mean, single = INPUT_LIMITS[reference.facts["device"]]
    planes = (data.double().reshape(len(data), -1, *data.shape[max(1, data.dim() - 2) :]) for data in (inputs, kept))
    ours, theirs = (avg_pool2d(plane, side, ceil_mode=True) for plane in planes)
    differences = (ours - theirs).abs().flatten(1)
    if differences.mean(1).max() > mean or differences.max() > single:
        why = f"differs from the run's by {differences.mean(1).max():.2g} of 255 in the mean"
        raise _refused(run, f"the input for {val.path(ids[0])} {why}", likely)


def _refused(run: TrainedRun, what: str, likely: str) -> CommandError:
    return CommandError(
        f"{run.folder}: {what}. Most likely {likely}: correct it, or give --unchecked, whose result says so"
    )
