"""What loaders and jobs need of each kind of source: samples by id."""

from typing import Protocol


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
