"""Texts of numbers, durations and lists."""

import os
from collections.abc import Sequence

import pytest

from raydali.text import duration, error_line, number, numbered, plural, printable, summarize
from tests.support.messages import mentions


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, "1 core"),
        (0, "0 cores"),
        (0.5, "0.5 cores"),
        (2.0, "2 cores"),
        (1, "1 class"),
        (2, "2 classes"),
        (2, "2 micro-batches"),
        (2, "2 epochs"),
        (3, "3 boxes"),
    ],
)
def test_nouns_follow_their_count(count: float, expected: str) -> None:
    noun = {"cor": "core", "cla": "class", "mic": "micro-batch", "epo": "epoch", "box": "box"}[expected.split()[1][:3]]
    assert plural(count, noun) == expected


def test_names_are_printable() -> None:
    name = os.fsdecode(b"a\xff\x1b[31m\n\xc3\xa9 \xe3\x80\x80\x85\xe2\x80\xae.jpg")
    assert printable(name) == "a\\xff\\x1b[31m\\n\u00e9 \u3000\\x85\\u202e.jpg"
    assert printable("one\n\ttwo\r\ud800", lines=True) == "one\n\ttwo\\r\\ud800"


def test_large_counts_keep_their_digits() -> None:
    assert plural(1_281_167, "image") == "1,281,167 images"


def test_what_is_left_out_is_counted() -> None:
    assert summarize(["a", "b"], 2) == "a, b"
    assert mentions(summarize("abcd", 2), "a b 2") and "c" not in summarize("abcd", 2)
    assert summarize([1, 2, 3], 1, separator="; ") == "1; and 2 more"
    assert summarize(iter("ab"), 1, total=7) == "a and 6 more"
    assert summarize([], 3) == ""


@pytest.mark.parametrize(
    ("numbers", "expected"), [([3], "rank 3"), ([0, 5], "ranks 0, 5"), (range(10), "ranks 0, 1, 2 and 7 more")]
)
def test_numbers_follow_their_noun(numbers: Sequence[int], expected: str) -> None:
    assert numbered("rank", numbers, limit=3) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("====\n----\n", ""),
        ("the actor died\n============", "the actor died"),
        ("The actor died.\n\tpid: 7\nWorker exit detail: it was killed.", "Worker exit detail: it was killed."),
        ("rank 1: OSError: /data/1.jpg: Stale\n\n", "rank 1: OSError: /data/1.jpg: Stale"),
        (
            "Traceback:\n  File x\ntorch.AcceleratorError: CUDA error: misaligned\nCompile with `TORCH_USE_CUDA_DSA`\n",
            "torch.AcceleratorError: CUDA error: misaligned",
        ),
        (
            "torch.distributed.DistNetworkError: timed out\nException raised from f at g:1:\nframe #0: h + 0x1",
            "torch.distributed.DistNetworkError: timed out",
        ),
    ],
)
def test_the_line_of_an_error_that_says_what_happened(text: str, expected: str) -> None:
    assert error_line(text) == error_line(Exception(text)) == expected


def test_a_number_that_was_not_measured_is_a_dash() -> None:
    assert [number(None), number(1234.5), number(0.25, ".1%"), number(3, "d", " s")] == ["-", "1,234", "25.0%", "3 s"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.447, "0.45 s"),
        (9.9, "9.9 s"),
        (59.0, "59.0 s"),
        (61.0, "1 min 1 s"),
        (18_060.0, "5 h 1 min"),
        (302_400.0, "3 d 12 h"),
        (float("inf"), "-"),
    ],
)
def test_durations_have_the_unit_that_suits_them(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
