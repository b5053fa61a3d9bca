"""report.html: what it says of made-up runs, odd ones among them, and what a large one costs."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raydali.report.html.charts import Line, chart
from raydali.report.html.history import History
from raydali.report.html.page import SAMPLES_BYTES, compare_page, metric_groups, run_page
from raydali.report.html.text import seconds, shown
from raydali.run.folder import RunFolder
from tests.support.clocks import calls_in, least_cpu_seconds
from tests.support.evaluations import found
from tests.support.messages import mentions
from tests.support.report_pages import charts, history, text, tree
from tests.support.report_runs import event, record, start, write


def test_a_finished_run_in_words_and_charts() -> None:
    events = [event("rehearsal", 3, ceiling_images_per_second=125.0, rehearsal_seconds=1.5, seconds=3), start(4.0)]
    done = history([record(epoch) for epoch in range(3)], [*events, event("finish", 20)], epochs=3, model="resnet18")
    page = run_page(done)
    said = text(page)
    assert "Finished: 3 of 3" in said and "100 images/s" in said and "80.0% of" in said
    assert "12.5% of" in said
    assert "2 workers on cpu" in said and "step 0 of 100" in said
    assert "for 1.5 s" in said and "125 images/s" in said
    assert "model resnet18" in said and "Verdict" not in said and "Samples" not in said
    drawn = charts(page)
    speeds = drawn["Images a second, by epoch"]["lines"]
    assert speeds == [
        {"label": "images/s", "x": [0, 1, 2], "y": [100, 100, 100]},
        {"label": "ceiling", "x": [0, 1, 2], "y": [125, 125, 125]},
    ]
    times = {line["label"]: line["y"] for line in drawn["Seconds, by epoch"]["lines"]}
    assert times["waiting for the loader"] == [0.25] * 3 and times["validating"] == [0.5] * 3
    assert times["other"] == [0.15] * 3 and times["starting"] == [4.0, 0, 0]
    first_words = "Images Seconds Shares Loss top1 Learning"
    assert [re.split(r"\W", title)[0] for title in drawn] == first_words.split()
    assert 'data-reload="0"' in page.decode() and 'data-reload="7"' in run_page(done, reload_seconds=7).decode()


def test_a_run_that_ended_early_says_why() -> None:
    why = "no better score for 2 validations, best in epoch 0"
    events = [start(4.0), event("early end", 20, why=why)]
    page = run_page(history([record(epoch) for epoch in range(3)], events, epochs=90))
    assert f"Ended early after 3 of 90 epochs: {why}. 100 images/s" in text(page)
    resumed = history([record(epoch) for epoch in range(3)], [*events, start(30.0, step=30)], epochs=90)
    assert "Under way" in text(run_page(resumed))


def test_nothing_is_asked_of_the_network() -> None:
    page = run_page(history([record(0)], [start(1)]))
    for tag, attributes in tree(page).tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert "default-src 'none'" in page.decode() and "url(" not in page.decode() and "@import" not in page.decode()


def test_an_empty_run() -> None:
    for made in (history([]), history([], model=None), History("pets", "/runs/pets")):
        said = text(run_page(made))
        assert "No step" in said and "images/s not measured" in said and "while training" not in said


def test_one_epoch_of_one_rank() -> None:
    page = run_page(history([record(0, ranks=1)], [start(1, world_size=1)]))
    assert "1 of 10 epochs" in text(page)
    assert charts(page)["Loss, by epoch"]["lines"][0]["y"] == [2.0]
    assert re.search(r'<path class="line c0" d="M50\.00 [\d.]+h\.01"/>', page.decode())  # a dot in the middle


def test_the_utilisation_is_shown_where_it_is_known() -> None:
    page = run_page(history([record(0), record(1, mfu=0.3512)]))
    assert charts(page)["Shares, by epoch"]["lines"][1] == {"label": "MFU", "x": [0, 1], "y": [None, 0.3512]}
    assert "MFU" in text(page) and "35.1%" in text(page)
    assert "MFU" not in text(run_page(history([record(0)])))


def test_nulls_are_dashes_and_gaps() -> None:
    bare = {name: None for name in record(0) if name not in ("epoch", "step")}
    page = run_page(history([record(0), bare | {"epoch": 1, "step": 20}, record(2)]))
    assert charts(page)["Loss, by epoch"]["lines"][0]["y"] == [2.0, None, 0.66667]
    assert re.search("1( \u2013){10}", text(page))
    only = run_page(history([bare | {"epoch": 0, "step": 1}]))
    assert charts(only) == {} and "null" not in text(only) and "None" not in text(only) and "nan" not in text(only)
    no_ceiling = history([record(0, ceiling_images_per_second=None, of_ceiling=None)])
    assert "100 images/s while training" in text(run_page(no_ceiling))
    assert "of the ceiling not measured" in text(run_page(no_ceiling))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e300, 10**400, "NaN", True, [], {}], ids=repr)
def test_losses_that_are_no_numbers(odd: Any) -> None:
    records = [record(0), record(1, loss=odd, validation={"loss": odd, "top1": odd}, images_per_second=odd), record(2)]
    page = run_page(history(records))
    assert charts(page)["Loss, by epoch"]["lines"][0]["y"] == [2.0, None, 0.66667]
    assert "NaN" not in json.dumps(charts(page)) and "Infinity" not in json.dumps(charts(page))


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"epoch": None},
        {"epoch": -1},
        {"epoch": 1e300},
        {"epoch": 1},
        {"epoch": 1, "ranks": [None, {}, {"rank": -1}, {"rank": 1e9}, {"rank": 0}], "validation": [1], "verdict": 3},
        {"epoch": 1, "step": 20, "seconds": 0, "images": 0, "ranks": [{"rank": 3, "seconds": 0, "images": 0}]},
        {"epoch": 1, "step": 20, "seconds": -5, "loader_wait_seconds": -1, "step_seconds": -1, "images": -1},
    ],
    ids=repr,
)
def test_odd_lines_are_lived_with(odd: Any) -> None:
    page = run_page(history([record(0), odd], [{}, {"event": None}, {"event": "start"}, {"time": 1e300, "event": "x"}]))
    assert "images/s" in text(page)


def test_names_cannot_break_out() -> None:
    evil = "</script><script>alert(1)</script>\"'<img src=x onerror=alert(2)>"
    made = history(
        [record(0, validation={evil: 0.5, "seconds": 1.0, "loss": 1.0}, verdict=evil)],
        [
            start(1, device=evil, versions={evil: evil}, nodes=[{"gpu": evil}]),
            event("failure", 2, ranks=[evil], error=evil),
            event(evil, 3, **{evil: evil}),
        ],
        **{"epochs": 1, evil: evil},
    )
    made.name = made.folder = evil
    classes = [each | {"class": evil} for each in found(3)["classes"]]
    of_model = found(3) | {"classes": classes, "data": evil, "broken": [{"path": evil, "reason": evil}]}
    made.files["evaluation.json"] = json.dumps(of_model).encode()
    other = history([record(0)], [start(1)])
    for page in (run_page(made), compare_page([made, other])):
        parsed = tree(page)
        assert "alert(1)" in "".join(parsed.texts)
        assert all(attributes.get("src", "data:").startswith("data:") for _, attributes in parsed.tags)  # type: ignore[union-attr]
        assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
        scripts = [attributes for tag, attributes in parsed.tags if tag == "script"]
        assert all(attributes == {"type": "application/json"} for attributes in scripts[:-1]) and not scripts[-1]


def test_passwords_in_addresses_are_left_out() -> None:
    assert shown("s3://key:secret@bucket/x?a=1") == "s3://\u2026@bucket/x?a=1"
    assert shown(["a", 1]) == "a, 1" and shown(None) == "\u2013" and shown(False) == "no"


def test_the_newest_verdict_is_shown() -> None:
    page = run_page(history([record(0, verdict="loader-bound: old"), record(1, verdict="step-bound: at the ceiling")]))
    assert "step-bound: at the ceiling" in text(page) and "old" not in text(page)
    assert "Verdict" not in text(run_page(history([record(0, verdict="loader-bound: old"), record(1)])))


def test_metrics_of_other_jobs() -> None:
    names = ["top1", "top5", "psnr", "input_psnr", "ssim", "map", "map_50", "mar_100"]
    assert metric_groups(names) == [["top1", "top5"], ["psnr", "input_psnr"], ["ssim"], ["map", "map_50"], ["mar_100"]]
    of_restoration = {"images": 9, "seconds": 1.0, "loss": 0.1, "psnr": 31.5, "input_psnr": 28.0, "ssim": 0.9}
    page = run_page(history([record(0, validation=of_restoration)]))
    assert {"psnr, input_psnr, by epoch", "ssim, by epoch"} <= charts(page).keys()


def test_what_has_no_content_is_left_out() -> None:
    of_validation = {"images": 9, "seconds": 0.5, "loss": 0.1, "top1": 0.5, "broken": 0}
    bare: dict[str, Any] = {
        "validation": of_validation,
        "ceiling_images_per_second": None,
        "of_ceiling": None,
        "checkpoint_seconds": 0.0,
    }
    page = run_page(history([record(0, **bare)], [start(1)]))
    said = text(page)
    for absent in ("broken", "top5", "checkpointing"):
        assert absent not in said
    assert "epoch images images/s wait seconds workers loss learning rate top1 0 200" in said
    broken = history([record(0, validation=of_validation | {"broken": 2})], [start(1)])
    assert charts(run_page(broken))["broken, by epoch"]["lines"][0]["y"] == [2]


@pytest.mark.parametrize(("side", "kind"), [(40, "png"), (900, "jpeg")])
def test_samples_are_embedded(side: int, kind: str) -> None:
    made, png = history([record(0)]), io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)).save(png, "PNG")
    made.files["samples.png"] = png.getvalue()
    page = run_page(made).decode()
    (picture,) = re.findall(r'alt="samples.png: [^"]*" src="data:image/(\w+);base64,([^"]+)"', page)
    assert picture[0] == kind and len(base64.b64decode(picture[1])) <= SAMPLES_BYTES
    made.files["samples.png"] = b"no picture"
    assert "samples.png cannot be read" in text(run_page(made))


def test_times_in_words() -> None:
    said = [seconds(value) for value in (None, 0.447, 9.9, 59.0, 61.0, 3600 * 5 + 60.0, 86400 * 3.5, float("inf"))]
    assert said == ["\u2013", "0.45 s", "9.9 s", "59.0 s", "1 min 1 s", "5 h 1 min", "3 d 12 h", "\u2013"]


def test_the_best_epoch_is_named_beside_the_last() -> None:
    made = history([record(epoch, validation={"top1": top1}) for epoch, top1 in enumerate((0.25, 0.53061, 0.4028))])
    made.files["model.json"] = b'{"best": {"epoch": 1, "metric": "top1", "score": 0.53061}}'
    said = text(run_page(made))
    assert "last top1 0.4028 in epoch 2, best top1 0.5306 in epoch 1 (best/, which evaluate" in said
    assert "--checkpoint newest" in said
    other = history([record(0)])
    other.name = "cats"
    compared = text(compare_page([made, other]))
    assert "top1 0.5306 in epoch 1 cats" in compared and "--checkpoint newest" in compared
    made.add_epoch(record(3, validation={"top1": 0.75}))
    made.files["model.json"] = b'{"best": {"epoch": 3, "metric": "top1", "score": 0.75}}'
    assert "top1 0.75 in epoch 3, the last and the best." in text(run_page(made))


@pytest.mark.parametrize(
    "model", [None, b"", b"[]", b'{"version": "0.2.0"}', b'{"best": null}', b'{"best": {"epoch": 1}}']
)
def test_runs_that_do_not_know_their_best_epoch(model: bytes | None) -> None:
    made = history([record(0)])
    if model is not None:
        made.files["model.json"] = model
    assert "best" not in text(run_page(made)) and "best" not in text(compare_page([made])).partition("Loss and")[0]


def test_a_comparison() -> None:
    first = history([record(epoch) for epoch in range(3)], [start(1), event("finish", 9)], epochs=3, model="resnet18")
    second = history([record(0, ranks=4, loss=7.5)], [start(1)], epochs=3, model="resnet50")
    second.name = "cats"
    page = compare_page([first, second])
    said = text(page)
    assert mentions(said, "pets 2 3 100 80.0% 12.5% 6 0.6667") and mentions(said, "cats 4 1 3 200 80.0% 12.5% 2 7.5")
    assert "model resnet18 resnet50" in said and "epochs 3 3" not in said
    curves = charts(page)["Images a second, by epoch"]["lines"]
    assert [(line["label"], line["y"]) for line in curves] == [("pets", [100] * 3), ("cats", [200])]
    many = compare_page([History("pets", f"/runs/{i}") for i in range(12)])
    assert "/runs/0" in text(many) and "None." in text(many)


def test_300_epochs_of_256_ranks(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    line = json.dumps(record(0, ranks=256))[len('{"epoch": 0, "step": 10') :].encode()
    folder.write("epochs.jsonl", b"".join(b'{"epoch": %d, "step": %d%s\n' % (i, 10 * i + 10, line) for i in range(300)))
    assert len(folder.read("epochs.jsonl")) > 12e6
    made = History.read(folder)
    assert len(made.epochs) == 300 and len(run_page(made)) < 2e6
    few, one = history([record(epoch, ranks=256) for epoch in range(3)]), record(300, ranks=256)
    assert calls_in(lambda: run_page(made)) < 50 * calls_in(lambda: run_page(few)), "all epochs drawn would be 100"
    assert least_cpu_seconds(lambda: made.add_epoch(one), 5) < 20 * least_cpu_seconds(lambda: few.add_epoch(one), 5)


def test_what_a_folder_holds_is_read(folder: RunFolder) -> None:
    write(folder, [record(0), record(1)], [start(1)])
    folder.write("samples.png", b"png")
    made = History.read(folder)
    assert (len(made.epochs), len(made.events), made.files) == (2, 1, {"samples.png": b"png"})
    assert made.settings["model"] == "resnet18" and made.name == "run"


@pytest.mark.parametrize("y", [[0.0], [5.0], [-1.0, 1.0], [1e-99, 2e-99], [1e6, 1e6 + 1e-9], [-1e99, 1e99], [3, 3, 3]])
def test_axes_hold_their_lines(y: list[float]) -> None:
    for from_zero in (True, False):
        (drawn,) = chart("y", [Line("y", list(range(len(y))), y, 0)], from_zero=from_zero)
        heights = [float(height) for height in re.findall(r"[ML][\d.]+ ([-\d.]+)", dict(drawn.paths)["line c0"])]
        assert len(heights) == len(y) and all(-0.1 <= height <= 100.1 for height in heights)
        assert 2 <= len(drawn.y_ticks) <= 9
    for stacked in (True, False):
        assert chart("y", [Line("y", [0], [None], 0)], stacked=stacked) == []
