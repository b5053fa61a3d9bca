"""Keys in the URIs of storages and data are refused, and not repeated in what says so."""

import sys

import pytest

from jobs import imagenet
from raydali import cli
from raydali.data.index.files import absolute
from raydali.data.read.storage import refuse_secrets
from raydali.errors import UsageError
from raydali.launch.driver.command import parse
from raydali.run.folder import RunFolder
from tests.support.messages import mentioning, mentions

URIS = [
    "s3://HUSH:HUSH@bucket/runs",
    "s3://HUSH@bucket/runs",
    "s3://HUSH:HU/SH@bucket/runs",
    "gs://HUSH:HUSH@bucket/runs",
    "https://me:HUSH@host/runs",
    "s3://bucket/runs?access_key=HUSH",
    "s3://bucket/runs?region=x&secret_key=HUSH",
    "s3://bucket/runs?X-Amz-Security-Token=HUSH",
]


@pytest.mark.parametrize("uri", URIS)
def test_a_uri_that_holds_a_key_is_refused_without_saying_it(uri: str) -> None:
    for refuse in (refuse_secrets, absolute, lambda uri: RunFolder(uri, "run")):
        with pytest.raises(UsageError, match=mentioning("AWS_ACCESS_KEY_ID")) as error:
            refuse(uri)
        assert "HU" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/runs/a@b?region=eu-west-1&endpoint_override=localhost:9000",
        "gs://anonymous@bucket/data",
        "hdfs://host:8020/runs",
        "/data/me@home?key=1",
        "s3://bucket/train-?????.tfrecord",
    ],
)
def test_what_holds_none_passes(text: str) -> None:
    refuse_secrets(text)


@pytest.mark.parametrize("option", ["--storage", "--data", "--val-data", "--root"])
def test_no_option_of_a_job_takes_a_key(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["imagenet.py", option, URIS[0]])
    with pytest.raises(UsageError, match=mentioning("user key")):
        parse(imagenet.Config)


@pytest.mark.parametrize(
    "arguments",
    ["report URI", "preview URI", "verify URI", "prepare URI to", "doctor --storage URI", "doctor --storage=URI"],
)
def test_no_command_takes_a_key(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments.replace("URI", URIS[0]).split())
    said = "".join(capsys.readouterr())
    assert end.value.code == 2 and mentions(said, "user key") and "HUSH" not in said
