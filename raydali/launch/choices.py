"""What the command line leaves open is chosen once, at a run's first start: by the driver or, for its hardware, by the
workers.

`config.json` holds it by value from then on. A resume takes it from there unless the option is given, on whatever
hardware it finds itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from raydali.data.settings import default_resize_size
from raydali.launch.options import LaunchOptions
from raydali.measure.hardware import COMPILE_PAYS_FROM, fastest_precision, has_bf16
from raydali.report.run_folder import CONFIG

if TYPE_CHECKING:
    from raydali.launch.session import Session

CHOSEN = "precision", "compile"
"""Options that are None until the workers choose them."""

Options = TypeVar("Options", bound=LaunchOptions)


def with_kept(options: Options, settings: Mapping[str, Any]) -> Options:
    """The options with what was chosen before, where nothing else is asked for now, and a size to resize to.

    That size follows the image size where there is none yet, or where the image size is another than it was.

    Args:
        settings: of `config.json`, where None, too, stands for what has yet to be chosen; empty at a first start.
    """
    kept: dict[str, Any] = {name: settings.get(name) for name in _unchosen(options)}
    if getattr(options, "resize_size", 0) is None:
        image_size: int = getattr(options, "image_size")  # noqa: B009  # of some jobs alone
        was = settings.get("resize_size") if settings.get("image_size") == image_size else None
        kept["resize_size"] = default_resize_size(image_size) if was is None else was
    return replace(options, **kept)


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


def _unchosen(options: LaunchOptions) -> list[str]:
    return [name for name in CHOSEN if getattr(options, name, False) is None]
