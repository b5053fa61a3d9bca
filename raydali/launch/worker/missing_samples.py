"""The check before the first step that no node lacks the samples.

If a disk is not mounted on one node, all samples that this node reads would otherwise be recorded as broken.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from raydali.data.loading.loader import Loader
from raydali.errors import NodeError
from raydali.text import plural
from raydali.train.worker import Worker

CHECKED_AHEAD = 8


def check_samples(loader: Loader, worker: Worker) -> None:
    """Read the same few samples on every rank if ranks run on several nodes. All ranks must call it.

    Raises:
        NodeError: most of them are missing on this rank's node, and another node has most of them.
    """
    if len(set(worker.exchange(worker.node))) == 1:
        return
    asked = min(CHECKED_AHEAD, len(loader.source))
    ids = [len(loader.source) * (2 * place + 1) // (2 * asked) for place in range(asked)]
    with ThreadPoolExecutor(asked) as threads:
        missing = [id for id, gone in zip(ids, threads.map(partial(_is_missing, loader), ids), strict=True) if gone]
    most = [2 * found > asked for found in worker.exchange(len(missing))]
    if 2 * len(missing) > asked and not all(most):
        raise NodeError(
            f"node {worker.node} lacks {len(missing)} of {plural(asked, 'sample')} that other nodes have, such as "
            f"{loader.source.path(missing[0])}: mount or copy the data there"
        )


def _is_missing(loader: Loader, id: int) -> bool:
    """Return whether the sample's file does not exist. Other errors are ignored: the loader will meet them again."""
    try:
        loader.pipeline.sample(loader.source, id, 0)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, FileNotFoundError):
                return True
            cause = cause.__cause__
    return False
