"""The machine chooses what the command line does not: once, at a run's first start.

`config.json` holds it by value from then on. A resume takes it from there unless the option is given, on whatever
hardware it finds itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from raydali.launch.options import LaunchOptions
from raydali.measure.hardware import COMPILE_PAYS_FROM, fastest_precision, has_bf16
from raydali.report.run_folder import CONFIG

if TYPE_CHECKING:
    from raydali.launch.session import Session

CHOSEN = "precision", "compile"
"""Options that are None until they are chosen."""

Options = TypeVar("Options", bound=LaunchOptions)


def with_kept(options: Options, settings: Mapping[str, Any]) -> Options:
    """The options with what was chosen before, where nothing else is asked for now.

    Args:
        settings: of `config.json`, where None, too, stands for what has yet to be chosen.
    """
    kept: dict[str, Any] = {name: settings.get(name) for name in _unchosen(options)}
    return replace(options, **kept)


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
