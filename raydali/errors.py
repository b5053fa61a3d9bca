"""The errors that end a job with one line and an exit code instead of a traceback."""


class RaydaliError(Exception):
    """An error that raydali has found; its message is sufficient."""


class UsageError(RaydaliError):
    """The user's input is invalid; the message names the value, the limit and the remedy. Exit code 2."""


class DataError(RaydaliError):
    """A sample cannot be read; the message names its file. The job fails: exit code 1."""


class StorageAway(RaydaliError):  # noqa: N818 (docs/own-loop.md promises the name)
    """A storage did not answer for a minute; it may again, and no file is to blame.

    Workers are started again later; a command fails with exit code 1.
    """


class DivergedError(RaydaliError):
    """Weights are NaN or infinite, or ranks differ twice; it would happen again. The job fails: exit code 1."""


class StorageError(RaydaliError):
    """A run's storage takes no checkpoints, or has none that can be used; the message says what to do. Exit code 1."""


class TrainingError(RaydaliError):
    """The run ended early; the message is the worker's own error. Exit code 1."""


class NodeError(RaydaliError):
    """A node cannot train, or computes wrong; the message says why. The run continues on the others if they suffice."""


class StartError(RaydaliError):
    """A Ray of our own did not start; the message says why, and where its logs are. Exit code 1."""


class SupersededError(StorageError):
    """Another driver, or a newer worker group, writes to this run; this one must not any more. Exit code 1."""


class CommandError(RaydaliError):
    """A command of `raydali` found a defect, or could not measure everything; what it has was shown and written.

    Exit code 1.
    """
