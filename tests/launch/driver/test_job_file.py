"""The file of a job: raydali's own by name, a user's by path, and how a run describes it."""

import hashlib
from pathlib import Path

import pytest

from raydali.errors import UsageError
from raydali.launch.driver.job_file import describe_job, find_job, own_jobs
from tests.support.cluster import ROOT
from tests.support.messages import mentioning

JOBS = {"detection", "grid", "imagenet", "restoration", "segmentation", "video"}


def test_the_clone_s_jobs_are_found_by_name() -> None:
    assert own_jobs() == {name: ROOT / f"jobs/{name}.py" for name in JOBS}
    assert {name: find_job(name) for name in JOBS} == own_jobs()


def test_a_file_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").touch()
    (tmp_path / "video").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_job("own.py") == find_job(str(tmp_path / "own.py")) == tmp_path / "own.py"
    assert find_job("video") == ROOT / "jobs/video.py"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_job("~/own.py") == tmp_path / "own.py"


@pytest.mark.parametrize(
    ("job", "named"),
    [
        ("imgenet", "imgenet imagenet"),
        ("jobs/vidoe.py", "vidoe.py video"),
        ("zzz", f"zzz {' '.join(sorted(JOBS))}"),
        ("panoptic", f"panoptic {' '.join(sorted(JOBS))} docs/own-data.md"),
    ],
)
def test_an_unknown_job_is_refused_with_those_that_are(job: str, named: str) -> None:
    with pytest.raises(UsageError, match=mentioning(named)):
        find_job(job)


def test_a_run_s_job_is_described(tmp_path: Path) -> None:
    (own := tmp_path / "own.py").write_bytes((ROOT / "jobs/imagenet.py").read_bytes())
    assert describe_job(ROOT / "jobs/imagenet.py") == describe_job(own) == {"name": "imagenet"}
    own.write_text(text := own.read_text() + "# mine\n")
    assert describe_job(own) == {
        "file": "own.py",
        "text": text,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
