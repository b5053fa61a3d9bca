"""docs/clusters.md beside the files that it is about: its commands, names of files and images are what there is."""

import re
import shlex

import tyro

from jobs.imagenet import Config
from raydali.commands.cluster import HEAD_ENVIRONMENT
from tests.support.cluster import ROOT
from tests.support.messages import mentions
from tests.support.ray_up_files import CLOUDS, prepared


def test_the_page_says_what_there_is() -> None:
    page = (ROOT / "docs/clusters.md").read_text()
    lines = [
        line
        for block in re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    assert all(line.startswith("$ ") for line in lines)
    for cloud in CLOUDS:
        assert {f"$ ray up cluster/{cloud}.yaml", f"$ ray dashboard cluster/{cloud}.yaml"} <= set(lines)
        for command in prepared(cloud)["initialization_commands"]:
            for secret in re.findall(r"--name (\S+auth_token)|--secret=(\S+)", command):
                assert f"{''.join(secret)} " in page
    for name in re.findall(r"(?<!tests/)\bcluster/[\w./-]+[\w]", page):
        assert (ROOT / name).exists(), name
    image = prepared("aws")["docker"]["image"].rpartition("/")[2]
    assert set(re.findall(r"raydali:[\w.-]+\w", page)) == {image}

    assert all(f"{name}={value}" in page for name, value in HEAD_ENVIRONMENT.items())

    from ray.scripts.scripts import cli

    assert set(re.findall(r"\$ ray ([a-z-]+)", page)) <= set(cli.commands)
    jobs = [line for line in lines if "ray job submit" in line]
    on_gpus = 0
    for line in jobs:
        _, _, options = line.partition(" python jobs/imagenet.py ")
        config = tyro.cli(Config, args=shlex.split(options), config=(tyro.conf.DisallowNone,))
        assert config.name and config.max_failures
        on_gpus += config.gpu and config.checkpoint_every > 0
        assert mentions(line, "--working-dir jobs/imagenet.py")
    assert on_gpus >= 2
