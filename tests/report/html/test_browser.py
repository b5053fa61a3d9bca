"""report.html in a real browser: nothing is complained of, and what it says can be read."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raydali.report.html.history import History
from raydali.report.html.page import compare_page, run_page
from tests.support.browser import Browser, chromium
from tests.support.evaluations import found
from tests.support.messages import mentions
from tests.support.report_runs import event, record, start

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs a chromium: apt-get install chromium")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def history(epochs: int = 5, ranks: int = 3) -> History:
    made = History("pets", "/runs/pets", {"epochs": epochs, "model": "resnet18", "fingerprint": "f" * 64})
    made.add_event(start(20, world_size=ranks))
    for epoch in range(epochs):
        made.add_epoch(record(epoch, ranks=ranks, loss=None if epoch == 1 else 1.0 / (1 + epoch)))
    made.add_event(event("failure", 40, ranks=[1], error="the worker died: " + "x" * 300))
    made.add_event(start(60, step=10 * epochs - 10, world_size=ranks))
    made.add_epoch(record(epochs - 1, ranks=ranks))
    made.add_event(event("finish", 90))
    made.files["evaluation.json"] = json.dumps(found(30)).encode()
    return made


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_bytes(run_page(history()))
    return file


@pytest.mark.parametrize(("size", "dark"), [("desktop", False), ("phone", True)])
def test_it_is_drawn_and_nothing_is_complained_of(browser: Browser, page: Path, size: str, dark: bool) -> None:
    width, height = SIZES[size]
    browser.open(page, width=width, height=height, dark=dark)
    said = browser.run("document.body.innerText")
    for expected in (
        "pets",
        "finished",
        "Finished: 5 of 5 epochs.",
        "of the ceiling",
        "Images a second",
        "resnet18",
        "Confusion matrix",
    ):
        assert expected in said
    assert browser.complaints() == []
    assert browser.run("document.documentElement.scrollWidth") <= width  # nothing to scroll sideways
    picture = np.asarray(Image.open(io.BytesIO(browser.picture())).convert("RGB")).astype(int)
    assert picture.shape[:2] == (height, width)
    brightness = float(np.median(picture))
    assert brightness < 60 if dark else brightness > 200
    assert picture.std() > 8 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 50
    saturated = np.ptp(picture, axis=2) > 80
    assert saturated.sum() > 100  # lines in their colours


def test_charts_answer_a_pointer_and_keys(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('.area').scrollIntoView({block: 'center'})")
    box = browser.run(
        "(({x, y, width, height}) => [x, y, width, height])(document.querySelector('.area').getBoundingClientRect())"
    )
    middle = {"x": box[0] + box[2] / 2, "y": box[1] + box[3] / 2}
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", **middle)
    assert mentions(browser.run("document.querySelector('output').textContent"), "2 images/s 150 ceiling 187.5")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.run("document.querySelector('output').textContent") == ""
    browser.run("document.querySelector('figure:nth-of-type(2) .plot').focus()")
    for _ in range(2):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    shown = browser.run("document.querySelector('figure:nth-of-type(2) output').textContent")
    assert mentions(shown, "1 0.25 1.5 0.5")
    assert browser.complaints() == []


def test_it_is_read_without_a_script(browser: Browser, page: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(re.sub("<script.*?</script>", "", page.read_text(), flags=re.DOTALL))
    browser.open(file)
    picture = np.asarray(Image.open(io.BytesIO(browser.picture())).convert("RGB")).astype(int)
    assert (np.ptp(picture, axis=2) > 80).sum() > 100


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_stand_out_from_their_ground(browser: Browser, page: Path, dark: bool) -> None:
    """A contrast of at least 4.5, as WCAG 2 asks for in its level AA."""
    browser.open(page, dark=dark)
    pairs = browser.run(
        "[...document.querySelectorAll('main *')].filter(e => [...e.childNodes].some(n => n.nodeType === 3 &&"
        " n.data.trim()) && e.tagName !== 'SCRIPT').map(e => { let g = e; while (g.parentElement &&"
        " getComputedStyle(g).backgroundColor === 'rgba(0, 0, 0, 0)') g = g.parentElement;"
        " return [e.tagName + ' ' + e.className, getComputedStyle(e).color, getComputedStyle(g).backgroundColor] })"
    )
    assert len(pairs) > 50 and any("srgb" in ground for _, _, ground in pairs)  # a confusion matrix

    def luminance(colour: str) -> float:
        parts = np.array([*map(float, re.findall(r"[\d.]+", colour)[:3])]) / (1 if "srgb" in colour else 255)
        linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    for what, ink, ground in pairs:
        low, high = sorted((luminance(ink), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (what, ink, ground)


def test_a_comparison_opens(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "comparison.html"
    other = history(8, 1)
    other.name = "a-run-with-quite-a-long-name-20261121-145514"
    file.write_bytes(compare_page([history(), other]))
    for width, height in SIZES.values():
        browser.open(file, width=width, height=height)
        assert mentions(browser.run("document.body.innerText"), "2 runs")
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.complaints() == []
