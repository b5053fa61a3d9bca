"""`raydali report`: write the report of a run, or a page that compares several runs.

    raydali report ~/raydali-runs/pets
    raydali report s3://my-bucket/runs/pets -o pets.html
    raydali report ~/raydali-runs/pets ~/raydali-runs/pets-2

A run writes report.html itself while it trains; this command writes it again from the run's folder.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from raydali.errors import UsageError
from raydali.output import require_writable, show, write_output

if TYPE_CHECKING:
    from raydali.report.html.history import History
    from raydali.run.folder import RunFolder

COMPARISON = "comparison.html"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a run's report.html again, or one page that compares several runs."""

    runs: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")
    ]
    """Folders of runs, such as ~/raydali-runs/pets or s3://bucket/runs/pets."""
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """File for the page. Default: report.html in the run's folder; for several runs, comparison.html in the storage
    folder that they share."""


def main(options: Report) -> None:
    """Read the runs, write the page, and print its path and the scores.

    Raises:
        UsageError: a folder is not a run's or cannot be read, or the page cannot be written.
    """
    from raydali.report.html import text
    from raydali.report.html.page import compare_page, run_page
    from raydali.run.find import find_run
    from raydali.run.ledger import describe

    if not options.runs:
        raise UsageError("report needs a run: give its folder, such as ~/raydali-runs/pets")
    require_writable("--output", options.output)
    folders = [find_run(run) for run in options.runs]
    output = options.output
    if len(folders) > 1 and output is None:
        storage, *others = {folder.uri_of_storage for folder in folders}
        if others or "://" in storage:
            raise UsageError("the runs are not in one local storage folder: give --output a file for the comparison")
        output = f"{storage}/{COMPARISON}"
    histories = [_history(folder, run) for folder, run in zip(folders, options.runs, strict=True)]
    if len(histories) > 1:
        contents = compare_page(histories)
        of_ledgers = [text.ledger_figures(history) for history in histories]
        rows = [
            (history.name, *text.scores(history), text.count(history.images_per_second), *ledger.values())
            for history, ledger in zip(histories, of_ledgers, strict=True)
        ]
        show("", ("run", "last", "best", "images/s", *of_ledgers[0]), rows)
        if folds := text.scores_of_folds(histories):
            print(folds)
    else:
        contents = run_page(histories[0])
        if scores := text.last_and_best(histories[0]):
            print(scores)
        if ledger := histories[0].ledger:
            print(*describe(ledger), sep="\n")
    if output is None:
        _write_to(folders[0], contents)
        return
    write_output(output, contents)
    print(f"{output}: {', '.join(map(str, folders))}")


def _history(folder: "RunFolder", run: str) -> "History":
    from raydali.data.read.storage import reason
    from raydali.report.html.history import History

    try:
        return History.read(folder)
    except OSError as error:
        raise UsageError(f"{run} cannot be read: check name, credentials and endpoint: {reason(error)}") from error


def _write_to(folder: "RunFolder", contents: bytes) -> None:
    from raydali.data.read.storage import reason
    from raydali.run.folder import REPORT

    try:
        folder.write(REPORT, contents)
    except OSError as error:
        raise UsageError(f"{folder}/{REPORT} cannot be written: {reason(error)}; give --output a file") from error
    print(f"{folder}/{REPORT}")
