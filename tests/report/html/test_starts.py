"""report.html on starts: resumes, ends of worker groups, and the environment of each."""

import json
import re
from typing import Any

import pytest

from raydali.report.html.event_table import event_table
from raydali.report.html.page import compare_page, run_page
from raydali.report.html.text import environment, state
from tests.support.messages import mentions
from tests.support.report_pages import charts, history, text
from tests.support.report_runs import event, record, start


def test_resumes_of_other_sizes() -> None:
    made = history([record(epoch, ranks=4) for epoch in range(4)], [start(5, world_size=4)])
    made.add_event(event("failure", 50, ranks=[2], error="it died"))
    assert "4 of 10 epochs" in state(made) and "it died" in state(made)
    made.add_event(start(70, step=20, world_size=3, seconds=70))
    assert [epoch.number for epoch in made.epochs] == [0, 1]  # steps 21 to 40 are trained again
    for epoch in (2, 3):
        made.add_epoch(record(epoch, ranks=3))
    assert [took for _, _, took in made.starts()] == [5, 20]  # since the failure
    made.add_event(event("interrupt", 90, why="interrupted, since the node goes"))
    assert mentions(state(made), "Interrupted 4 10")
    made.add_event(start(200, step=40, world_size=2, seconds=10))
    made.add_event(event("resize", 270, workers=1))
    made.add_event(start(300, step=50, world_size=1, seconds=110))
    made.add_event(start(400, step=60, world_size=1, seconds=210))  # whose workers before ended without a word
    assert [took for _, _, took in made.starts()] == [5, 20, 10, 30, None]
    ((at, label),) = event_table(made).marks
    assert at == 1.5 and mentions(label, "20 100 3 cpu 4")
    page = run_page(made)
    starting = next(x for x in charts(page)["Seconds, by epoch"]["lines"] if x["label"] == "starting")
    assert starting["y"] == [5, 0, 20, 0]
    assert "on cpu, before 4" in text(page) and "on cpu, before 2" in text(page)
    assert "since the node goes" in text(page)


def test_a_setting_that_a_resume_changed_stands_at_its_line() -> None:
    made = history([record(epoch) for epoch in range(4)], [start(5)])
    made.add_event(event("settings", 50, changed={"resize_size": [256, 32], "val_data": [None, "/val"]}))
    assert made.status == "starting"
    made.add_event(start(70, step=20, seconds=70))
    made.add_epoch(record(2))
    ((_, label),) = event_table(made).marks
    changed = "--resize-size 32 instead of 256, --val-data /val instead of \u2013"
    assert label.startswith("resumed at step 20 of 100: ") and label.endswith(f"; {changed}")
    assert f"other settings: {changed}" in text(run_page(made))
    made.add_event(start(90, step=20, seconds=90))
    made.add_epoch(record(2))
    assert changed not in event_table(made).marks[-1][1]


@pytest.mark.parametrize("end", ["failure", "preemption", "resize"])
def test_from_the_end_of_a_worker_group_on_the_next_one_starts(end: str) -> None:
    made = history([record(0)], [start(10), event(end, 60)])
    assert made.status == ("broken" if end == "failure" else "starting")
    made.add_event(start(100, step=10))
    made.add_epoch(record(1))
    starting = next(x for x in charts(run_page(made))["Seconds, by epoch"]["lines"] if x["label"] == "starting")
    assert starting["y"] == [10, 40]


H200 = {"workers": 8, "cores": 128, "gpu": "NVIDIA H200"}
CPU = {"workers": 2, "cores": 2, "gpu": None}


def of_start(torch: str, *nodes: dict[str, Any]) -> dict[str, Any]:
    named = [{"node": f"{i:08x}", **node} for i, node in enumerate(nodes)]
    return {"versions": {"python": "3.11.7", "torch": torch, "raydali": None}, "nodes": named}


def test_the_environment_and_what_a_resume_changed_in_it() -> None:
    made = history([record(0)], [start(1, **of_start("2.11.0", H200, H200, CPU))])
    facts = environment(made)
    assert (facts["python"], facts["torch"], facts["raydali"]) == ("3.11.7", "2.11.0", "\u2013")
    assert re.findall(r"\d+", facts["machines"]) == [*("2", "128", "8", "200"), *("1", "2", "2")]
    made.add_event(start(9, step=10, **of_start("2.11.0", CPU)))
    made.add_event(start(20, step=20))  # by an older raydali
    made.add_event(start(30, step=1200, **of_start("2.15.0", CPU)))
    facts = environment(made)
    assert mentions(facts["torch"], "2.11.0 1,200 2.15.0")
    assert re.findall(r"\d+", facts["machines"])[-4:] == ["10", "1", "2", "2"]
    assert facts["machines"] in text(run_page(made))
    odd = [start(1, versions=[1], nodes=[None, {"gpu": 3}]), start(1, versions={"a": {}}, nodes=3)]
    facts = environment(history([], odd))
    assert facts["a"] == "{}" and mentions(facts["machines"], "1 3") and facts["machines"].count("\u2013") == 2
    assert environment(history([record(0)], [start(1)])) == {}
    assert "Environment" not in text(run_page(history([record(0)], [start(1)])))


def test_what_repeats_the_run_is_shown() -> None:
    node = CPU | {"cpu": "AMD EPYC 7B13", "memory": 2**34}
    command = "raydali train imagenet --epochs 2"
    made = history([record(0)], [start(1, **of_start("2.15.0", node), command=command, parameters=11_181_642)])
    made.settings = {"cuda_graph": True, "epochs": 2}
    made.files["model.json"] = json.dumps({"classes": ["cat", "dog"], "samples_of_classes": [1200, 7]}).encode()
    facts = environment(made)
    assert (facts["command"], facts["parameters"]) == (command, "11,181,642")
    assert facts["samples of each class"] == "cat 1,200, dog 7"
    assert "2 cores of AMD EPYC 7B13, 16.0 GiB of memory" in facts["machines"]
    said = text(run_page(made))
    assert all(fact in said for fact in facts.values()) and "cuda_graph" not in said
    made.events[0] = {**made.events[0], "device": "cuda"}
    assert "cuda_graph yes" in text(run_page(made))
    made.files["model.json"] = json.dumps({"classes": 3}).encode()
    assert "samples of each class" not in environment(made)


def test_environments_are_compared() -> None:
    facts = [of_start("1.0", H200), of_start("2.0", CPU), {}]
    runs = [history([record(0)], [start(1, **each)]) for each in facts]
    for run, name in zip(runs, "abc", strict=True):
        run.name = name
    said = text(compare_page(runs))
    assert "python 3.11.7 3.11.7 \u2013" in said and "torch 1.0 2.0" in said
    assert all(environment(run).get("machines", "\u2013") in said for run in runs)
    assert "3.11.7" not in text(compare_page(runs[:1] * 2))


def test_what_the_first_start_chose_is_shown_as_a_setting() -> None:
    chosen = event("chosen", 3, precision="fp32", compile=False)
    made = history([], [chosen], epochs=1, precision=None, compile=True)
    assert (made.settings["precision"], made.settings["compile"]) == ("fp32", True)  # given on a later resume
    assert made.status == "starting" and "precision fp32" in text(run_page(made))


def test_the_phases_of_a_start_are_in_its_line() -> None:
    made = history([record(0)], [start(5, phases={"imports": 3.2, "compile": 61.0, "odd": "x"})])
    assert "cpu; imports 3.2 s, compile 1 min 1 s" in text(run_page(made))
    made.add_event(start(70, step=10, seconds=70, phases={"worker start": 9.0}))
    made.add_epoch(record(1))
    ((_, label),) = event_table(made).marks
    assert "worker start" not in label and "cpu; worker start 9 s" in text(run_page(made))
