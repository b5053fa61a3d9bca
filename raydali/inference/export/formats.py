"""Defines the formats of exported models: how a network becomes the content of a file, and how a file is used."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from raydali.errors import CommandError, UsageError
from raydali.inference.export.exported_model import INPUT, ExportedModel
from raydali.text import printable

Outputs = tuple[NDArray[Any], ...]
Images = NDArray[np.uint8]
ONNX_LIMIT = 2 * 10**9
"""Bytes of weights that an ONNX file can hold: a file is one message of protobuf, of less than 2 GiB."""
_EXAMPLE = 2, 3, 301, 203
"""Batch, channels, height and width of the images that the graph is traced with."""


class Format(NamedTuple):
    """A format of exported models.

    Attributes:
        reader: what runs its files in the proof.
        content: returns the content of the file of a model. Raises CommandError if the model's code cannot be traced or
            translated, UsageError if it is too large.
        opened: returns the function that the content of a file is: from images (N, 3, H, W) to all outputs.
        modules: modules of the extra `export` that it needs.
    """

    reader: str
    content: Callable[[ExportedModel], bytes]
    opened: Callable[[bytes], Callable[[Images], Outputs]]
    modules: tuple[str, ...] = ()


def onnx_content(model: ExportedModel) -> bytes:
    """Return an ONNX file; its metadata has the facts."""
    import onnx

    size = sum(value.nbytes for value in model.network.state_dict().values())
    if size > ONNX_LIMIT:
        raise UsageError(f"{size / 1e9:.1f} GB of weights exceed the 2 GB of an ONNX file: give --to torch-export")
    try:
        program = traced(model)
    except CommandError:  # a graph of ONNX has no conditions; the proof has sizes of all kinds
        if model.size is not None:
            raise
        program = traced(model, any_condition=True)
    with _translating("ONNX"):
        exported = torch.onnx.export(
            program, dynamo=True, input_names=[INPUT], output_names=[*model.network.outputs], verbose=False
        )
        assert exported is not None
        proto = exported.model_proto
        for name, fact in model.facts.items():
            proto.metadata_props.add(key=name, value=printable(fact) if isinstance(fact, str) else json.dumps(fact))
        onnx.checker.check_model(proto, full_check=True)
    content: bytes = proto.SerializeToString()
    return content


def opened_onnx(content: bytes) -> Callable[[Images], Outputs]:
    """Return what an ONNX file computes, in onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # see WAIT_POLICY
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda images: tuple(session.run(None, {INPUT: images}))


def torch_export_content(model: ExportedModel) -> bytes:
    """Return a file of `torch.export`; its extra file raydali.json has the facts."""
    program, content = traced(model), io.BytesIO()
    with _translating("torch.export"):
        torch.export.save(program, content, extra_files={"raydali.json": json.dumps(dict(model.facts), indent=2)})
    return content.getvalue()


def opened_torch_export(content: bytes) -> Callable[[Images], Outputs]:
    """Return what a file of `torch.export` computes, on the CPU."""
    network = torch.export.load(io.BytesIO(content)).module()

    def run(images: Images) -> Outputs:
        with torch.inference_mode():
            return tuple(output.numpy() for output in network(torch.from_numpy(images)))

    return run


FORMATS = {
    "onnx": Format("onnxruntime", onnx_content, opened_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "torch-export": Format("torch.export", torch_export_content, opened_torch_export),
}


def traced(model: ExportedModel, *, any_condition: bool = False) -> torch.export.ExportedProgram:
    """Trace a model, with batch, height and width left open; of a network that takes one size alone, only the batch.

    Args:
        model: its code may depend on these sizes.
        any_condition: accept that the graph holds under conditions on the sizes, such as that they are even.

    Raises:
        CommandError: its code cannot be traced.
    """
    dim = torch.export.Dim
    names = ("batch", "height", "width") if model.size is None else ("batch",)
    sizes = [dim.DYNAMIC if any_condition else dim(name) for name in names]
    shape = _EXAMPLE if model.size is None else (*_EXAMPLE[:2], *model.size)
    with _translating("torch.export"):
        return torch.export.export(
            model.network,
            (torch.zeros(shape, dtype=torch.uint8),),
            dynamic_shapes={INPUT: dict(zip((0, 2, 3), sizes, strict=False))},
        )


@contextlib.contextmanager
def _translating(target: str) -> Iterator[None]:
    """Turn the errors of an exporter into one line, and drop what it prints besides: warnings, pages of advice."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    except Exception as error:  # of many kinds
        raise CommandError(
            f"the model cannot be translated to {target} ({_why(error)[:60]}): change its code, or try the other --to"
        ) from error
    finally:
        logging.disable(disabled)


def _why(error: BaseException) -> str:
    """Return the first line of what an error began with; exporters add pages of advice to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
