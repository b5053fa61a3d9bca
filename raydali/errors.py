"""The errors that end a job with one line and an exit code instead of a traceback."""


class UsageError(Exception):
    """What was asked cannot be done as asked; the message names the value, the limit and the remedy. Exit code 2."""


class DataError(Exception):
    """A sample cannot be read; the message names its file. The job fails: exit code 1."""
