"""The live display of a terminal, and the plain lines that come now and then elsewhere."""

import io
import re
from typing import Any

import pytest
from rich.console import Console as RichConsole

from raydali.measure.records import Figures
from raydali.report.console import Console
from raydali.report.progress_display import Display
from raydali.run.events import Started
from raydali.run.messages import EpochEnded, Progress, RankFigures
from tests.support.console import CONTROL, RECORD, Output, progress
from tests.support.messages import mentions


def figures(rank: int, wait: float | None, **others: float) -> RankFigures:
    return RankFigures(rank, Figures(images=0, loader_wait_fraction=wait, **({"of_ceiling": 0.9} | others)))  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list of one that the test may change."""
    now = [1000.0]
    monkeypatch.setattr("raydali.report.progress_display.time.monotonic", lambda: now[0])
    return now


def test_facts_are_wrapped_between_words(on_terminal: Output, clock: list[float], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    console = Console()
    console.show(EpochEnded(RECORD | {"verdict": "loader-bound by decoding: slow"}))
    console.show(figures(0, 0.02))
    console.show(progress(100, 3200))
    clock[0] += 2.0
    console.show(progress(400, 6400000))
    on_terminal()
    console._display.refresh()
    frame = on_terminal()
    console.close()
    lines = [line for line in CONTROL.sub("", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", frame)).splitlines() if line.strip()]
    assert all(len(line.rstrip()) <= 60 for line in lines) and "\u2026" not in frame
    said = " ".join(line.strip() for line in lines)
    assert "loss 2.7183" in said and " left, loader-bound by decoding" in said


@pytest.mark.parametrize(("epochs", "every", "validation"), [(30, 1, 20.0), (30, 7, 20.0), (2, 1, 18.0), (90, 1, 0.5)])
def test_the_end_is_estimated_within_5_percent_from_a_tenth_of_the_run_on(
    epochs: int, every: int, validation: float, clock: list[float]
) -> None:
    """Steps of 0.5 s, 200 of them an epoch; the first estimate of a validation of 3,200 samples is 20 s."""
    display = Display(RichConsole(file=io.StringIO()))
    steps, messages = 200 * epochs, list[tuple[float, float]]()
    began = clock[0]
    for step in range(1, steps + 1):
        clock[0] += 0.5
        epoch = (step - 1) // 200
        validates = [each for each in range(epoch, epochs) if (each + 1) % every == 0 or each == epochs - 1]
        samples: dict[str, Any] = {"validations": len(validates), "validation_samples": 3200}
        display.progress(
            Progress(step=step, steps=steps, epoch=epoch, epochs=epochs, samples_consumed=step * 32, **samples)
        )
        if step >= steps / 10 and step % 20 == 0:
            left = display.seconds_left()
            assert left is not None
            messages.append((clock[0], clock[0] + left))
        if step % 200 == 0 and epoch in validates:
            clock[0] += validation
            display.epoch({"validation": {"seconds": validation}})
    whole = clock[0] - began
    assert max(abs(end - clock[0]) for _, end in messages) < 0.05 * whole


def test_the_cost_at_the_end(clock: list[float]) -> None:
    output = io.StringIO()
    display = Display(RichConsole(file=output))
    group = {"workers": 2, "released": None}
    display.ledger({"cost_usd": 5.0, "price_usd_per_gpu_hour": 1.8, "groups": [{**group, "released": 1.0}, group]})
    display.progress(Progress(step=1, steps=3601, epoch=0, epochs=1, samples_consumed=8))
    clock[0] += 2.0
    display.progress(Progress(step=2, steps=3602, epoch=0, epochs=1, samples_consumed=16))
    assert display.seconds_left() == pytest.approx(7200) and "2.0 h left, $12.20 at the end" in display.line()


def test_a_terminal_gets_a_display_that_leaves_with_the_end(on_terminal: Output, clock: list[float]) -> None:
    console = Console()
    console.show(progress(100, 3200, epochs=2))
    clock[0] += 2.0
    console.show(progress(220, 7040, epoch=1, epochs=2))
    for rank, wait in enumerate((0.02, 0.04, 0.03, 0.61)):
        console.show(figures(rank, wait))
    console._display.refresh()
    text = on_terminal()
    assert "step 220/400" in text and "1920 images/s (mean 1920)" in text
    assert re.search(r"epoch 1 .*10%", text), "of the second epoch's 200 steps, 20 are done"
    assert mentions(text, "wait 18% 90% ceiling 3")
    assert mentions(text, "rank 3 loader 61% 4%") and "rank 1 waits" not in text
    console.show(EpochEnded(RECORD | {"verdict": "straggler, rank 3 on node a: its loader"}))
    console._display.refresh()
    text = on_terminal()
    assert "loss 2.7183" in text and mentions(text, "straggler rank 3 node a")
    console.close()
    console.close()
    console.print("the end")
    text = on_terminal()
    assert "step 220/400" not in text.rpartition("\x1b[1A\x1b[2K")[2], "the last thing done to it is erasing it"
    assert text.endswith("the end\n")


@pytest.mark.usefixtures("on_terminal")
def test_the_worst_stragglers_are_shown_until_a_restart() -> None:
    console = Console()
    for rank in range(20):
        console.show(figures(rank, rank / 20 if rank > 13 else 0.0))
    stragglers = console._display.stragglers()
    assert [line.split(" waits")[0] for line in stragglers] == [
        "rank 19",
        "rank 18",
        "rank 17",
        "rank 16",
        "and 2 more",
    ]
    console.show(Started(step=0, steps=400, world_size=2, device="cpu", seconds=1.0))
    console.show(figures(0, None))
    assert console._display.stragglers() == []


@pytest.mark.usefixtures("on_terminal")
def test_a_rank_with_slow_steps_is_shown_with_the_current_loss() -> None:
    console = Console()
    console.show(progress(10, 320))
    for rank, seconds in enumerate((0.2, 0.21, 0.3)):
        console.show(figures(rank, 0.0, own_step_seconds=seconds, loss=1.0 + rank))
    (straggler,) = console._display.stragglers()
    assert mentions(straggler, "2 0.3 0.21")
    assert "loss 2.0000" in console._display.line()


def test_elsewhere_a_plain_line_comes_now_and_then(output: Output, clock: list[float]) -> None:
    console = Console()
    lines = []
    for step in range(1, 181):
        console.show(progress(step, 32 * step))
        lines += output().splitlines()
        clock[0] += 0.5
    assert len(lines) == 2
    assert re.findall(r"\d+", lines[0]) == ["0", "61", "400", "64", "64", "3"]


def test_a_resume_goes_back_and_is_no_negative_rate(on_terminal: Output, clock: list[float]) -> None:
    console = Console()
    for step, seconds in ((100, 0.0), (80, 1.0), (80, 0.0)):
        clock[0] += seconds
        console.show(progress(step, 32 * step))
        console._display.refresh()
    text = on_terminal()
    console.close()
    assert "step 80/400" in text
    assert "-" not in "".join(re.findall(r"\S+ images/s", text))


def test_a_new_bar_after_the_end_of_another(on_terminal: Output) -> None:
    console = Console()
    for step in (10, 20):
        console.show(progress(step, 32 * step))
        console.close()
        assert f"step {step}/400" in on_terminal()
