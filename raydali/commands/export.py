"""`raydali export`: the model of a run as one file for other programs, proved on the run's validation samples.

    raydali export ~/raydali-runs/pets
    raydali export ~/raydali-runs/pets --to torch-export -o pets.pt2

Resizing, cropping and normalising are part of the file: 8-bit images of any size go in, probabilities come out. A file
is written only if it answers as the trained model does.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from raydali.errors import CommandError, UsageError
from raydali.options.inference import InferenceOptions
from raydali.options.placement import AT_LEAST_1
from raydali.output import JsonFile, require_there, require_writable, write_json
from raydali.run import local_files
from raydali.text import plural

ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2"}
NOT_EXPORTED = (
    "cannot be exported, since it takes more than an image or returns no tensors, as detectors and video models: give "
    "a run of imagenet, restoration or a task of your own"
)

if TYPE_CHECKING:
    from raydali.inference.export.proof import Proof


@dataclass(frozen=True, kw_only=True)
class Export(InferenceOptions):
    """Export the model of a run with its resizing and normalisation, and prove the file on the run's samples."""

    to: Literal["onnx", "torch-export"] = "onnx"
    """Format: an ONNX file, or a file of torch.export."""
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """File, which must not exist. Default: the run's name, and .onnx or .pt2, in this folder."""
    precision: Literal["fp32"] = "fp32"
    """Floats of the proof."""
    images: Annotated[int, AT_LEAST_1] = 500
    """Number of images that the file is proved on, evenly from all samples."""
    data: str | None = None
    """Samples with labels for the proof. Default: the validation samples of the run."""
    json: JsonFile = None


def main(options: Export) -> None:
    """Translate the model, compare both on the same images, and write the file.

    Raises:
        UsageError: the run or the data cannot be used or exported, or the file exists.
        CommandError: the model cannot be translated; the file does not answer as the model does.
        DataError, StorageAway: the samples cannot be read.
    """
    # All that needs no PyTorch, whose import takes seconds.
    from raydali.inference.job_module import found_run

    run_and_job = found_run(options.run, options.job)
    if run_and_job.job.task in ("detection", "video"):
        raise UsageError(f"{run_and_job.folder} {NOT_EXPORTED}")
    require_there("--data", options.data)
    require_writable("--json", options.json)
    output = Path(options.output or run_and_job.folder.name + ENDINGS[options.to]).expanduser()
    require_writable("--output", str(output))
    if output.exists():
        raise UsageError(f"--output {output} exists: give another one, or remove it")

    from raydali.data.broken.quarantine import none_read
    from raydali.extras import require_extra
    from raydali.host.hardware import set_max_connections
    from raydali.inference.engine import checked_inference
    from raydali.inference.export.exported_model import exported_model
    from raydali.inference.export.formats import FORMATS
    from raydali.inference.export.proof import LEAST, agreement, images_for, prove, suffices
    from raydali.inference.samples import labeled_samples
    from raydali.inference.task_results.task_results import results_class
    from raydali.inference.trained_run import open_run

    format = FORMATS[options.to]
    for module in format.modules:
        require_extra("export", module, f"files in {ENDINGS[options.to]}")
    set_max_connections()  # before the exporters initialise CUDA
    run = open_run(run_and_job, options.checkpoint)
    every, classes = labeled_samples(run, options.data)
    source = _some(every, options.images)
    task_results = results_class(run)(run, source, classes)
    inference, checked = checked_inference(run, task_results, options)
    print(checked.text)
    model = exported_model(run, inference.network, task_results)
    model = replace(model, facts={**model.facts, "checked": checked.text})
    try:
        content = format.content(replace(model, size=None))
    except CommandError:
        if model.size is None:
            raise
        content = format.content(model)
    broken = dict[int, str]()
    images = images_for(model.network, source, run.pipeline, broken)
    proof = prove(model.network, format.opened(content), images)
    if proof is None:
        raise none_read(f"{source.path(id)}: {why}" for id, why in broken.items())
    _print(proof, format.reader, len(broken))
    agreed = None
    if proof.holds and proof.answers:
        agreed = agreement(inference, options, proof, several=model.network.answer == "labels")
    result: dict[str, Any] = {
        "run": str(run.folder),
        "weights": run.weights.origin,
        "checked": checked.text,
        "file": str(output),
        "bytes": len(content),
        "data": options.data or str(every),
        "proof": proof.figures,
        "evaluate": agreed,
        "broken": [{"path": source.path(id), "reason": why} for id, why in broken.items()],
    }
    if options.json is not None:
        write_json(result, options.json)
    if not proof.holds:
        raise CommandError(f"{output} is not written, since {format.reader} does not answer as torch: report it")
    _write(output, content)
    print(f"{output}: {len(content) / 1e6:.1f} MB, {run.folder}, {run.weights.origin}")
    if agreed is None:
        return
    same, answers = agreed["same"], agreed["answers"]
    print(f"as evaluate, on pixels of its loader: {same:,} of {answers:,} ({same / answers:.2%})")
    if not suffices(agreed):
        raise CommandError(
            f"{output} is written, but has only {same / answers:.2%} of evaluate's answers, not {LEAST:.1%}: compare "
            "with --loader torch"
        )


def _some(source: Any, images: int) -> Any:  # noqa: ANN401 (an index of any kind)
    """Return a source with so many samples, evenly from all."""
    import numpy as np

    if len(source) <= images:
        return source
    kept = np.linspace(0, len(source) - 1, images).round().astype(np.int64)
    return source.drop(np.setdiff1d(np.arange(len(source)), kept).tolist())


def _print(proof: "Proof", reader: str, broken: int) -> None:
    sizes = " and ".join(map(str, proof.batch_sizes))
    print(f"{reader} and torch in fp32, on the same {plural(proof.images, 'image')} in batches of {sizes}:")
    answers = proof.same + proof.close + proof.different
    print(f"  same answer {proof.same:,} of {answers:,}, by rounding another {proof.close}, else {proof.different}")
    differences = ", ".join(f"{name} {value:.2g}" for name, value in proof.largest_difference.items())
    print(f"  largest difference: {differences} (limit {proof.limit:.2g})")
    if broken:
        print(f"  left out {plural(broken, 'image')} that cannot be read")


def _write(output: Path, content: bytes) -> None:
    """Write the file, which appears whole or not at all."""
    try:
        local_files.create(output, content)
    except FileExistsError:
        raise UsageError(f"--output {output} exists: give another one, or remove it") from None
    except OSError as error:
        raise CommandError(f"{output} cannot be written ({error.strerror}): give another --output") from error
