"""What the driver imports is light: it answers a mistyped option before anything heavy is loaded."""

import subprocess
import sys

import pytest

HEAVY = {"ray", "torch", "torchvision", "nvidia", "PIL", "sklearn"}
JOBS = {"detection": "SHAPES", "imagenet": "DIGITS", "restoration": "BLURRED", "video": "DISCS"}
MODULES = "tasks.classification", "builtin.digits", "index.labeled", "stream.stream"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        # Jobs look at the run's storage with pyarrow.
        ([f"import jobs.{job} as job; job.train_pipeline(job.{demo})" for job, demo in JOBS.items()], HEAVY),
        ([f"import raydali.data.{module}" for module in MODULES], HEAVY | {"pyarrow"}),
    ],
    ids=["jobs", "data"],
)
def test_the_driver_imports_nothing_heavy(code: list[str], heavy: set[str]) -> None:
    program = "\n".join(["import sys", *(f"{line}; print(*sorted({heavy} & {{*sys.modules}}))" for line in code)])
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "\n" * len(code)
