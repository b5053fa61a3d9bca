"""What the driver imports is light: it answers a mistyped option before anything heavy is loaded."""

import subprocess
import sys

import pytest

HEAVY = {"ray", "torch", "torchvision", "nvidia", "PIL", "sklearn"}


@pytest.mark.parametrize(
    "code",
    [
        "import jobs.detection as job; job.train_pipeline(job.SHAPES)",
        "import jobs.imagenet as job; job.train_pipeline(job.DIGITS)",
        "import jobs.restoration as job; job.train_pipeline(job.BLURRED)",
        "import jobs.video as job; job.train_pipeline(job.DISCS)",
        "import raydali.data.tasks.classification",
        "import raydali.data.sources.builtin.digits",
        "import raydali.data.sources.labeled",
        "import raydali.data.stream.stream",
    ],
)
def test_the_driver_imports_nothing_heavy(code: str) -> None:
    heavy = HEAVY if "jobs." in code else HEAVY | {"pyarrow"}  # jobs look at the run's storage with it
    code += f"\nimport sys; print(*sorted({heavy} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "\n"
