"""This file has the options that choose the validation samples of jobs that may split their data."""

from dataclasses import dataclass
from typing import Annotated, Any

from raydali.data.index.validation_set import Split
from raydali.errors import UsageError
from raydali.options.every_job import TrainingOptions
from raydali.options.placement import Bounds


@dataclass(frozen=True, kw_only=True)
class SplitOptions(TrainingOptions):
    """The samples that validate, of data that has no validation samples of its own."""

    data: str | None = None
    """Folder or URI of the samples. Default: built-in samples."""
    val_fraction: Annotated[float | None, Bounds(above=0, below=1)] = None
    """Share of --data that validates, chosen by a hash of each path; unchangeable. Default: 0.1 of folders without
    validation samples."""
    fold: str | None = None
    """K/N: the K-th of N equal parts of --data validates, chosen by a hash of each path, for cross-validation in N
    runs; unchangeable. Default: --val-fraction."""
    val_group: str | None = None
    """Regular expression with groups: samples in whose paths it finds the same text, such as (patient_[0-9]+), either
    all train or all validate. Or column:NAME of a list. Unchangeable. Default: each sample is on its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_data(self, self.data, *self.splitting)
        Split(*self.splitting.values())

    @property
    def splitting(self) -> dict[str, Any]:
        """The options that choose the validation samples, by name."""
        return {name: getattr(self, name) for name in ("val_fraction", "fold", "val_group")}


def require_data(options: TrainingOptions, data: str | None, *names: str) -> None:
    """Refuse options of these names if `--data` is not given; those with the default of their class are not given.

    Raises:
        UsageError: naming the option and its value.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and data is None and value != type(options).__dataclass_fields__[name].default:
            raise UsageError(f"--{name.replace('_', '-')} {value} also needs the training set: give --data")
