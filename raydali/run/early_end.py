"""The end of a run before its last epoch, by --patience or --stop-after, which its rows in epochs.jsonl decide alone.

No further state is kept: rows that no checkpoint covers are dropped by a resume, so that the count of validations is
right after failures, too.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from raydali.text import plural

GO_ON = "with a higher --patience or --stop-after, or without, the same command goes on"


def early_end(
    rows: Sequence[Mapping[str, Any]], metric: str | None, *, patience: int | None, stop_after: int | None
) -> str | None:
    """Return why a run ends after these epochs, as a clause; None if it goes on.

    Args:
        rows: "epoch" and "validation" of each epoch, as in epochs.jsonl.
        metric: name of the score that chooses the best weights, higher is better; None if there are none yet.
        patience: number of validations in a row without a better score that ends the run; None: no limit.
        stop_after: number of epochs that ends the run; None: no limit.
    """
    best, of_best, since = -inf, "", 0
    for row in rows:
        if row["validation"] is not None:
            score = row["validation"].get(metric)  # None stands for NaN, as JSON has it
            if score is not None and score > best:
                best, of_best, since = score, f", best in epoch {row['epoch']}", 0
            else:
                since += 1
    if patience is not None and since >= patience:
        return f"no better score for {plural(since, 'validation')}{of_best}"
    if stop_after is not None and rows and rows[-1]["epoch"] + 1 >= stop_after:
        return f"--stop-after {stop_after} is reached"
    return None
