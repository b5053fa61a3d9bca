"""`raydali new`: copy a job, to change it.

raydali new imagenet my_job.py
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from raydali.errors import UsageError
from raydali.launch.driver.job_file import find_job


@dataclass(frozen=True, kw_only=True)
class New:
    """Copy a job to a file of your own, which runs as it is."""

    job: tyro.conf.Positional[str]
    """Name of a job, such as imagenet, detection, restoration, video or grid, or a file."""
    file: tyro.conf.Positional[str]
    """File to write, such as my_job.py. It must not exist."""


def main(options: New) -> None:
    """Write the copy, whose examples of commands name its file, and print the command that runs it.

    Raises:
        UsageError: there is no such job, or the file cannot be written.
    """
    source, target = find_job(options.job), Path(options.file).expanduser()
    if target.is_dir():
        raise UsageError(f"{options.file} is a folder: give a file in it, such as {target / 'my_job.py'}")
    if target.suffix != ".py":
        raise UsageError(f"{options.file} must end with .py: give {options.file}.py")
    text = source.read_text().replace(f"python jobs/{source.name}", f"python {target.name}")
    try:
        with target.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{options.file} exists: give another file, or remove it") from None
    except FileNotFoundError:
        folder = target.parent  # /proc, for one, exists and takes no files
        why = "takes no files: give another one" if folder.exists() else f"does not exist: mkdir -p {folder}"
        raise UsageError(f"the folder {folder} {why}") from None
    except OSError as error:
        raise UsageError(f"{options.file} cannot be written: {error.strerror}; give another file") from error
    print(f"{options.file} is a copy of the job {source.stem}: raydali train {options.file}")
