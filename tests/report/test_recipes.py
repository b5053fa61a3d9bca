"""The published figure beside the run's own: on the console and in report.html."""

from raydali.report.html.page import run_page
from raydali.report.html.text import beside_published, recipe_lines
from raydali.training.recipe import find_recipe
from tests.support.messages import mentions
from tests.support.report_pages import history, text
from tests.support.report_runs import event, record, start

SETTINGS = {"recipe": "fashion", **find_recipe("fashion").options()}


def test_a_finished_run_has_the_published_figure_beside_its_own() -> None:
    events = [start(4.0), event("finish", 20)]
    said = text(run_page(history([record(0)], events, **SETTINGS)))
    assert "Top-1 0.5000; recipe fashion: 0.967 published (Fashion-MNIST, WRN40-4)." in said
    said = text(run_page(history([record(0)], events, **SETTINGS | {"epochs": 1})))
    assert "; this run differs: --epochs 1 instead of 180." in said
    for other in ({}, {"recipe": None}, {"recipe": "of-another-version"}):
        assert "published" not in text(run_page(history([record(0)], events, **other)))
    assert "published" not in text(run_page(history([record(0)], events[:1], **SETTINGS)))  # not finished


def test_the_beginning_lists_the_figure_its_source_and_each_difference() -> None:
    (first,) = recipe_lines(SETTINGS)
    assert mentions(first, "fashion 0.967 https://github.com/zalandoresearch/fashion-mnist")
    _, *differing = recipe_lines(SETTINGS | {"epochs": 1, "batch_size": 64})
    assert [line.split(": ")[1] for line in differing] == [
        "--epochs 1 instead of 180",
        "--batch-size 64 instead of 512",
    ]
    assert [*recipe_lines({"epochs": 1})] == []


def test_a_run_without_accuracy_has_none_beside() -> None:
    assert beside_published(history([], **SETTINGS)) is None
