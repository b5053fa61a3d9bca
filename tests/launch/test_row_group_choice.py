"""Which blocks are chosen for data that is read by row groups, and what is said about them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jobs.imagenet import Config
from raydali.data.stream.class_mixing import ClassMixing
from raydali.data.stream.read_together import ReadTogether
from raydali.launch.choices import window_warning, with_kept
from raydali.launch.row_group_choice import HIGH, with_row_groups
from tests.support.messages import mentions

GROUP = 100
CONFIG = Config(name="run", epochs=2, batch_size=32, global_batch_size=128, loader="dali")


class Rows:
    """Rows of 1,000 bytes in row groups, of which a process keeps some."""

    def __init__(self, samples: int = 60_000, kept: int = 80, group: int = GROUP) -> None:
        groups = np.arange(samples) // group
        each = np.full(samples, 1000)
        self.read_together = ReadTogether(groups, np.bincount(groups) * 1000, each, kept * group * 1000)

    def __len__(self) -> int:
        return len(self.read_together.groups)


def choose(rows: Rows, config: Config = CONFIG, **options: Any) -> tuple[Config, list[str], list[str]]:
    """The options, what was told, and the warnings."""
    told, warned = list[str](), list[str]()
    labels = np.random.default_rng(0).integers(0, 10, len(rows))
    needed: dict[str, Any] = {"labels": labels, "workers": (4, 4), "cpus": 4} | options
    chosen = with_row_groups(config, rows, **needed, tell=told.append, warn=warned.append)  # type: ignore[arg-type]
    return chosen, told, warned


def test_a_full_shuffle_is_replaced_by_blocks_of_row_groups() -> None:
    rows = Rows()
    chosen, (told,), warned = choose(rows)
    assert chosen.shuffle_block == GROUP and chosen.shuffle_apart and not warned
    full, mixed = (replace(CONFIG, shuffle_block=0).stream(len(rows)), chosen.stream(len(rows)))
    reads = [rows.read_together.amplification(stream, 4) for stream in (full, mixed)]
    assert reads[0] > 0.8 * GROUP and reads[1] < 1.25
    assert mentions(told, f"{GROUP} --shuffle-block {GROUP} {reads[1]:.1f} {reads[0]:.1f}")
    labels = np.random.default_rng(0).integers(0, 10, len(rows))
    assert window_warning(chosen, len(rows), labels) == ""
    settings = {"shuffle_block": GROUP, "shuffle_window": chosen.shuffle_window, "shuffle_apart": True}
    assert with_kept(CONFIG, settings).stream(len(rows)) == mixed


def test_apart_workers_do_not_read_the_same_blocks() -> None:
    rows = Rows()
    stream = choose(rows)[0].stream(len(rows))
    assert rows.read_together.amplification(replace(stream, shuffle_apart=False), 4) > 3


@pytest.mark.parametrize("rows", [Rows(kept=600), Rows(samples=600, group=1, kept=60)])
def test_data_that_need_no_blocks_have_none(rows: Rows) -> None:
    chosen, told, warned = choose(rows)
    assert (chosen.shuffle_block, chosen.shuffle_apart, chosen.shuffle_window) == (0, False, None)
    assert not told and not warned


def test_what_was_given_is_kept_with_a_warning() -> None:
    chosen, told, (warned,) = choose(Rows(), replace(CONFIG, shuffle_block=0))
    assert chosen.shuffle_block == 0 and not told and mentions(warned, f"{GROUP} --shuffle-block")
    chosen, told, no_warnings = choose(Rows(), replace(CONFIG, shuffle_block=GROUP, shuffle_apart=True))
    assert chosen.shuffle_block == GROUP and not told and not no_warnings


def test_repeats_have_only_the_blocks_that_are_given() -> None:
    """Those that are chosen keep micro-batches apart, and repeats would not stay in different global batches."""
    config = replace(CONFIG, repeats=3)
    chosen, told, (warned,) = choose(Rows(), config)
    assert (chosen.shuffle_block, chosen.shuffle_apart) == (0, False) and not told
    assert mentions(warned, f"{GROUP} --shuffle-block")
    assert choose(Rows(), replace(config, shuffle_block=GROUP))[0].stream(60_000).shuffle_block == GROUP


def test_classes_that_blocks_cannot_mix_are_shuffled_in_full() -> None:
    rows, config = Rows(), replace(CONFIG, batch_size=256, global_batch_size=1024)
    labels = np.arange(len(rows)) // 60
    chosen, told, (warned,) = choose(rows, config, labels=labels)
    assert chosen.shuffle_block == 0 and not told and mentions(warned, f"{GROUP} class folders")
    in_blocks = replace(config, shuffle_block=GROUP, shuffle_apart=True, shuffle_window=16).stream(len(rows))
    assert not ClassMixing.of(labels, in_blocks).is_enough


def test_windows_follow_the_memory_of_the_fewest_workers() -> None:
    chosen = choose(Rows(kept=40))[0]
    fewer = choose(Rows(kept=40), workers=(1, 4))[0]
    assert (chosen.shuffle_window, fewer.shuffle_window) == (0, 8)
    assert Rows(kept=40).read_together.amplification(chosen.stream(60_000), 1) > HIGH


def test_processes_of_pytorch_read_for_themselves() -> None:
    chosen, _, (warned,) = choose(Rows(), replace(CONFIG, loader="torch"))
    assert chosen.shuffle_block and mentions(warned, "class folders")
