"""What the command line leaves open is chosen once, at a run's first start: by the driver or, for its hardware, by the
workers.

`config.json` holds it by value from then on. A resume takes it from there unless the option is given, on whatever
hardware it finds itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.stream.class_mixing import ClassMixing, fitting_window, is_useful, useful_block
from raydali.data.tasks.settings import default_resize_size
from raydali.host.hardware import COMPILE_PAYS_FROM, fastest_precision, has_bf16
from raydali.launch.options import LaunchOptions
from raydali.run.folder import CONFIG

if TYPE_CHECKING:
    from raydali.launch.worker.session import Session

CHOSEN = "precision", "compile"
"""Options that are None until the workers choose them."""
OF_EARLIER_VERSIONS = {"shuffle_window": 0}
"""Settings that earlier versions did not know, where they had others than today's defaults."""

Options = TypeVar("Options", bound=LaunchOptions)


def with_kept(options: Options, settings: Mapping[str, Any]) -> Options:
    """The options with what was chosen before, where nothing else is asked for now, and a size to resize to.

    That size follows the image size where there is none yet, or where the image size is another than it was.

    Args:
        settings: of `config.json`, where None, too, stands for what has yet to be chosen; empty at a first start.
    """
    kept: dict[str, Any] = {name: settings.get(name) for name in _unchosen(options, (*CHOSEN, "shuffle_window"))}
    if getattr(options, "resize_size", 0) is None:
        image_size: int = getattr(options, "image_size")  # noqa: B009  # of some jobs alone
        was = settings.get("resize_size") if settings.get("image_size") == image_size else None
        kept["resize_size"] = default_resize_size(image_size) if was is None else was
    return replace(options, **kept)


def with_window(options: Options, samples: int, labels: NDArray[np.int64] | None) -> Options:
    """The options with the window of blocks that these labels need, where it is open."""
    if not options.shuffle_block or options.shuffle_window is not None:
        return options
    return replace(options, shuffle_window=fitting_window(labels, options.stream(samples)))


def window_warning(options: LaunchOptions, samples: int, labels: NDArray[np.int64] | None) -> str:
    """What there is to say of shuffling in blocks on these labels; empty for nothing."""
    stream = options.stream(samples)
    if not stream.shuffle_block or labels is None:
        return ""
    said, mixing = f"--shuffle-block {stream.shuffle_block}", ClassMixing.of(labels, stream)
    if mixing.is_enough and is_useful(stream):
        return ""
    fitted = replace(stream, shuffle_window=fitting_window(labels, stream))
    if is_useful(fitted):
        remedy = f"--shuffle-window {fitted.shuffle_window}"
    else:
        block = useful_block(labels, stream)
        remedy = f"--shuffle-block {block}" if block else "no --shuffle-block"
    if not mixing.is_enough:
        return (
            f"{said}: a global batch holds {mixing.in_blocks} classes (median), with all samples shuffled "
            f"{mixing.in_full}: a new --name with {remedy} has nearly as many"
        )
    return (
        f"{said}: for {mixing.in_full} classes in a global batch it mixes blocks from all over the data, "
        f"and keeps no neighbours together: try {remedy}"
    )


def crop_warning(options: LaunchOptions) -> str:
    """What there is to say of a centre crop of less than half of the side; empty for nothing."""
    side, shorter = getattr(options, "image_size", 0), getattr(options, "resize_size", None)
    if shorter is None or 2 * side >= shorter:
        return ""
    share = f"{(side / shorter) ** 2:.1%} of a square image"
    return (
        f"centre crops of --image-size {side} out of --resize-size {shorter} show {share}: "
        f"try --resize-size {default_resize_size(side)}"
    )


def chosen(options: Options, session: "Session", *, samples: int) -> Options:
    """The options with everything chosen, in a worker; all ranks must call it.

    What `config.json` lacks is chosen for the hardware of all workers, written there and told to the driver before
    anything is trained: a worker group that takes over, however soon, finds it there.

    Raises:
        StorageAway: the storage does not answer, for a minute.
    """
    worker, folder = session.worker, session.folder
    first, device = worker.rank == 0, worker.device.type
    bf16 = all(worker.exchange(has_bf16(worker.device)))
    if _unchosen(options):
        settings: dict[str, Any] = {}
        if first:
            with folder.must_answer():
                settings = folder.read_json(CONFIG)
        options = with_kept(options, worker.from_first({name: settings.get(name) for name in CHOSEN}))
        if names := _unchosen(options):
            pays = device == "cuda" and options.stream(samples).steps >= COMPILE_PAYS_FROM
            here: dict[str, Any] = {"precision": fastest_precision(device, bf16=bf16), "compile": pays}
            values = {name: here[name] for name in names}
            options = replace(options, **values)
            if first:
                with folder.must_answer():
                    folder.write_json(CONFIG, settings | values)
                session.tell("event", event="chosen", **values)
    if first and not bf16 and getattr(options, "precision", None) == "bf16":
        faster = fastest_precision(device, bf16=False)
        text = f"bf16 is slow here, where not every device has it: --precision {faster} is faster"
        session.tell("warning", rank=worker.rank, text=text)
    return options


def _unchosen(options: LaunchOptions, names: Sequence[str] = CHOSEN) -> list[str]:
    return [name for name in names if getattr(options, name, False) is None]
