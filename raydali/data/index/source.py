"""The protocols of sources, for loaders and jobs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

if TYPE_CHECKING:  # `raydali --help` imports this file
    import numpy as np
    from numpy.typing import NDArray

    from raydali.data.read.contents import Contents


class Source(Protocol):
    """N samples of any kind by id 0..N-1."""

    def __len__(self) -> int:
        """N."""

    def path(self, id: int) -> str:
        """The origin of a sample, for messages."""

    @property
    def fingerprint(self) -> str:
        """A hash of the samples: a run is resumed only on the data that it began with."""


class Readable(Protocol):
    """N contents by id 0..N-1, such as the image files of a source."""

    def contents(self, ids: "NDArray[np.int64]") -> "Contents":
        """Read some at the same time; each is uint8 (bytes,), or `Failed`."""


def classes_of(source: Source) -> tuple[str, ...]:
    """Return the classes of a source in order; none if its samples have none."""
    return tuple(getattr(source, "classes", ()))


def class_labels(source: Source) -> "NDArray[np.int64] | None":
    """Return the label of each sample (N,), or the rarest one of its labels, -1 for none; None: samples have no labels.

    Boxes count with their labels.
    """
    import numpy as np

    labels: NDArray[Any] | None = getattr(source, "labels", None)
    if (one_each := getattr(source, "one_each", None)) is not None or labels is None or labels.dtype.kind == "f":
        return one_each
    if labels.ndim == 2:
        samples, labels = np.nonzero(labels)
    else:  # of boxes
        samples = np.repeat(np.arange(len(source)), np.diff(source.first_boxes))  # type: ignore[attr-defined]
    rarest = np.lexsort((labels, np.bincount(labels)[labels], samples))
    of_samples, first = np.unique(samples[rarest], return_index=True)
    found = np.full(len(source), -1)
    found[of_samples] = labels[rarest][first]
    return found


class Relocatable(Protocol):
    """An index of data that may be at another path on another node."""

    def relocate(self, root: str) -> Self:
        """Return the same index for a copy of the data at another root."""


AnySource = TypeVar("AnySource", bound=Relocatable)


@dataclass(frozen=True)
class TrainAndVal(Generic[AnySource]):
    """The indexes of a training and a validation set."""

    train: AnySource
    val: AnySource

    def relocate(self, root: str, train: str = "train", val: str = "val") -> Self:
        """Return the same indexes for copies in two folders of another root."""
        return type(self)(self.train.relocate(f"{root}/{train}"), self.val.relocate(f"{root}/{val}"))
