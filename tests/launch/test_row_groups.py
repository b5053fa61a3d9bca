"""Which blocks are chosen for data that is read by row groups, and what is said about them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jobs.imagenet import Config
from raydali.data.stream.class_mixing import ClassMixing
from raydali.data.stream.read_together import ReadTogether
from raydali.launch.driver.option_checks import tell_amplification, window_warning
from raydali.options.defaults import Facts, resolve
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


def choose(rows: Rows, config: Config = CONFIG, **known: Any) -> tuple[Config, list[str], list[str]]:
    """The options, what was told, and the warnings."""
    told, warned = list[str](), list[str]()
    labels = np.random.default_rng(0).integers(0, 10, len(rows))
    needed: dict[str, Any] = {"samples": len(rows), "source": rows, "labels": labels, "workers": (4, 4), "cpus": 4}
    facts = Facts(**needed | known)
    chosen = resolve(config, {}, facts)
    tell_amplification(config, chosen, facts, told.append, warned.append)
    return chosen, told, warned


def test_a_full_shuffle_is_replaced_by_blocks_of_row_groups() -> None:
    rows = Rows()
    chosen, (told,), warned = choose(rows)
    assert chosen.shuffle_block == 4 * GROUP and chosen.shuffle_apart and not warned
    full, mixed = (replace(CONFIG, shuffle_block=0).stream(len(rows)), chosen.stream(len(rows)))
    reads = [rows.read_together.amplification(stream, 4) for stream in (full, mixed)]
    assert reads[0] > 0.8 * GROUP and reads[1] < 1.25
    assert mentions(told, f"{GROUP} --shuffle-block {4 * GROUP} {reads[1]:.1f} {reads[0]:.1f}")
    labels = np.random.default_rng(0).integers(0, 10, len(rows))
    assert window_warning(chosen, len(rows), labels) == ""
    settings = {"shuffle_block": 4 * GROUP, "shuffle_window": chosen.shuffle_window, "shuffle_apart": True}
    assert resolve(CONFIG, settings).stream(len(rows)) == mixed


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


def test_blocks_follow_the_memory_of_the_fewest_workers() -> None:
    """A worker with four micro-batches of a step keeps the blocks of four windows."""
    rows = Rows(kept=64)
    chosen, fewer = choose(rows)[0], choose(rows, workers=(1, 4))[0]
    assert (chosen.shuffle_block, fewer.shuffle_block) == (4 * GROUP, 2 * GROUP)
    alone = [rows.read_together.amplification(each.stream(60_000), 1) for each in (fewer, chosen)]
    assert alone[0] < 1.25 < alone[1]


def test_short_row_groups_are_read_about_once() -> None:
    """As of files whose last row group is short: blocks begin in the middle of row groups."""
    rows = Rows()
    sizes = np.tile([100] * 43 + [58], 60)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    rows.read_together = ReadTogether(groups, sizes * 1000, np.full(len(groups), 1000), 10**8)
    chosen, (told,), warned = choose(rows)
    assert chosen.shuffle_apart and mentions(told, f"--shuffle-block {chosen.shuffle_block}") and not warned
    assert rows.read_together.amplification(chosen.stream(len(rows)), 4) < 1.3


def test_classes_that_a_window_lacks_get_a_larger_one() -> None:
    labels = np.arange(60_000) // 6000
    chosen, _, warned = choose(Rows(), labels=labels)
    assert chosen.shuffle_apart and chosen.shuffle_window != 4 and not warned
    assert ClassMixing.of(labels, chosen.stream(60_000)).is_enough


def test_processes_of_pytorch_read_for_themselves() -> None:
    chosen, _, (warned,) = choose(Rows(), replace(CONFIG, loader="torch"))
    assert chosen.shuffle_block and mentions(warned, "class folders")
