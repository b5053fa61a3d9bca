"""What loaders and jobs need of each kind of source: samples by id."""

from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar


class Source(Protocol):
    """N samples by id 0..N-1, whatever they are: what loaders and jobs need of each kind."""

    def __len__(self) -> int:
        """N."""
        ...

    def path(self, id: int) -> str:
        """Where a sample comes from, for messages."""
        ...

    @property
    def fingerprint(self) -> str:
        """Another one for other samples: a run is resumed on its own data only."""
        ...

    @property
    def dali_reads(self) -> bool:
        """Whether inputs that are files are paths, for `fn.io.file.read`, rather than contents."""
        ...


class Relocatable(Protocol):
    """An index of data that may lie elsewhere on another node."""

    def relocate(self, root: str) -> Self:
        """Return the same index for a copy of the data at another root."""
        ...


AnySource = TypeVar("AnySource", bound=Relocatable)


@dataclass(frozen=True)
class TrainAndVal(Generic[AnySource]):
    """The indexes of a training and a validation set."""

    train: AnySource
    val: AnySource

    def relocate(self, root: str, train: str = "train", val: str = "val") -> Self:
        """Return the same indexes for copies in two folders of another root."""
        return type(self)(self.train.relocate(f"{root}/{train}"), self.val.relocate(f"{root}/{val}"))
