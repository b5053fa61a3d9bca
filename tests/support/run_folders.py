"""Storage on a local disk and in S3, one after the other."""

from pathlib import Path
from uuid import uuid4

import pytest

from raydali.run.folder import RunFolder


@pytest.fixture(params=["local", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> RunFolder:
    """A made run folder."""
    storage = str(tmp_path)
    if request.param == "s3":
        bucket = uuid4().hex
        request.getfixturevalue("s3")(bucket, {})
        storage = f"s3://{bucket}/runs"
    folder = RunFolder(storage, "run")
    folder.create()
    return folder
