"""Options that are chosen for the hardware of all workers: precision, compilation and fused BatchNorm."""

from dataclasses import replace
from typing import Any

from raydali.host.hardware import COMPILE_PAYS_FROM, fastest_precision, has_bf16
from raydali.launch.choices import CHOSEN, Options, unchosen, with_kept
from raydali.launch.worker.session import Session
from raydali.run.events import OptionsChosen
from raydali.run.folder import CONFIG, RunFolder


def chosen(options: Options, session: Session, *, samples: int) -> Options:
    """Return the options with a value for each one that was left open. All ranks must call it.

    Values that are not in `config.json` yet are chosen for the hardware of all workers, written there and reported to
    the driver before training begins. A later worker group therefore uses the same values.

    Raises:
        StorageAway: the storage did not answer for a minute.
    """
    worker, folder = session.worker, session.folder
    first, device = worker.rank == 0, worker.device.type
    bf16 = all(worker.exchange(has_bf16(worker.device)))
    if unchosen(options):
        settings = _kept(folder) if first else {}
        options = with_kept(options, worker.from_first({name: settings.get(name) for name in CHOSEN}))
        if unchosen(options):
            given = {name: getattr(options, name) for name in CHOSEN if hasattr(options, name)}
            compiled, fused = given.get("compile"), given.get("fused")
            if compiled is None:
                pays = options.stream(samples).steps >= COMPILE_PAYS_FROM
                compiled = device == "cuda" and (pays or fused is True)
            here: dict[str, Any] = {
                "precision": given.get("precision") or fastest_precision(device, bf16=bf16),
                "compile": compiled,
                "fused": device == "cuda" and compiled and fused is not False,
            }
            values = {name: here[name] for name in given if here[name] != given[name]}
            options = replace(options, **values)
            if first:
                with folder.must_answer():
                    folder.write_json(CONFIG, settings | values)
                session.emit(OptionsChosen(options=values))
    if first and not bf16 and getattr(options, "precision", None) == "bf16":
        faster = fastest_precision(device, bf16=False)
        session.warn(f"--precision bf16 is slow, since not every device here supports it: {faster} is faster")
    return options


def _kept(folder: RunFolder) -> dict[str, Any]:
    with folder.must_answer():
        settings: dict[str, Any] = folder.read_json(CONFIG)
    return settings
