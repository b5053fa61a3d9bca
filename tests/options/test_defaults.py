"""Defaults that depend on facts about a run are chosen once, at the first start, and kept."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from jobs.detection import Config as DetectionConfig
from jobs.imagenet import Config
from jobs.video import Config as VideoConfig
from raydali.data.index.labeled import LabeledFiles
from raydali.data.stream.class_mixing import ClassMixing
from raydali.data.tasks.settings import KINETICS_MEAN, KINETICS_STD
from raydali.errors import UsageError
from raydali.host.hardware import COMPILE_PAYS_FROM, cpu_facts, fastest_precision
from raydali.launch.driver.option_checks import check_loader, crop_warning, window_warning
from raydali.launch.driver.resume import PreviousRun, changes
from raydali.launch.worker import run_worker
from raydali.launch.worker.run_worker import resolve_on_hardware
from raydali.options.defaults import Facts, resolve
from raydali.run.events import OptionsChosen
from raydali.run.folder import RunFolder
from raydali.run.messages import Message, RankWarning
from tests.support.messages import mentioning, mentions
from tests.support.ranks import LocalSession, folder_of, run_ranks

CONFIG = Config(name="run", epochs=1, batch_size=4, global_batch_size=8)
LONG = 8 * COMPILE_PAYS_FROM
"""Samples of a run that compiling pays in."""


def begun(path: Path, **settings: Any) -> RunFolder:
    folder = folder_of(path)
    unchosen = {"precision": None, "compile": None, "fused": None}
    folder.write_json("config.json", {"model": "resnet50"} | unchosen | settings)
    return folder


def choose(
    folder: RunFolder, config: Config, *, bf16: bool = False, samples: int = LONG, device: str = "cpu"
) -> tuple[Any, Any, list[Message]]:
    """The precision, whether it is compiled, and the messages, on such hardware."""
    session = LocalSession(folder, device=torch.device("cpu"))
    object.__setattr__(session.worker, "device", torch.device(device))
    vars(run_worker)["has_bf16"] = lambda _: bf16
    options = resolve_on_hardware(config, session, samples=samples)
    return options.precision, options.compile, session.messages


@pytest.fixture(autouse=True)
def _own_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(run_worker), "has_bf16", vars(run_worker)["has_bf16"])


def test_choices_of_the_first_start_hold_on_other_hardware(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    assert choose(folder, CONFIG)[:2] == ("fp32", False)
    settings = folder.read_json("config.json")
    assert settings == {"model": "resnet50", "precision": "fp32", "compile": False, "fused": False}
    assert choose(folder, CONFIG, bf16=True, device="cuda") == ("fp32", False, [])  # the group that takes over
    resumed = resolve(CONFIG, settings)
    assert (resumed.precision, resumed.compile) == ("fp32", False)
    given = resolve(replace(CONFIG, precision="fp16", compile=True), settings)
    assert (given.precision, given.compile) == ("fp16", True)


def test_an_older_run_keeps_its_slow_defaults_with_a_warning(tmp_path: Path) -> None:
    folder = begun(tmp_path, precision="bf16", compile=False, fused=False)
    precision, compiled, messages = choose(folder, CONFIG)
    assert (precision, compiled) == ("bf16", False)
    (warning,) = messages
    assert isinstance(warning, RankWarning) and mentions(warning.text, "--precision fp32")
    assert choose(folder, CONFIG, bf16=True)[2] == []


@pytest.mark.parametrize(
    ("device", "bf16", "samples", "expected"),
    [
        ("cpu", False, LONG, ("fp32", False)),
        ("cpu", True, LONG, ("bf16", False)),
        ("cuda", False, LONG - 8, ("fp16", False)),
        ("cuda", True, LONG, ("bf16", True)),
    ],
)
def test_it_is_by_the_hardware_and_the_length_of_the_run(
    tmp_path: Path, device: str, bf16: bool, samples: int, expected: tuple[str, bool]
) -> None:
    folder = begun(tmp_path)
    *values, messages = choose(folder, CONFIG, bf16=bf16, samples=samples, device=device)
    assert tuple(values) == expected
    precision, compiled = expected
    assert messages == [OptionsChosen(options={"precision": precision, "compile": compiled, "fused": compiled})]


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cuda", {"compile": True}, (True, True)),
        ("cuda", {"compile": True, "fused": False}, (True, False)),
        ("cuda", {"compile": True, "cuda_graph": False}, (True, False)),  # its launches would take longer
        ("cuda", {"fused": True, "cuda_graph": False}, (True, True)),
        ("cuda", {"fused": True}, (True, True)),
        ("cuda", {"fused": False}, (False, False)),
        ("cuda", {"compile": False}, (False, False)),
        ("cpu", {"compile": True}, (True, False)),
        ("cpu", {"fused": True}, (False, False)),
    ],
)
def test_compiled_models_on_gpus_are_fused(
    tmp_path: Path, device: str, given: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    folder = begun(tmp_path, **given)
    choose(folder, replace(CONFIG, **given), samples=8, device=device)
    settings = folder.read_json("config.json")
    assert (settings["compile"], settings["fused"]) == expected


def test_what_is_given_or_cannot_be_is_not_resolve_on_hardware(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    assert choose(folder, replace(CONFIG, precision="fp16"), bf16=True)[:2] == ("fp16", False)
    assert folder.read_json("config.json")["precision"] is None  # the driver's to write
    detection = DetectionConfig(name="run", epochs=1, batch_size=4, global_batch_size=8)
    assert resolve_on_hardware(detection, LocalSession(folder), samples=LONG).compile is False


def choice_of_rank(folder: RunFolder) -> str | None:
    session = LocalSession(folder)
    vars(run_worker)["has_bf16"] = lambda _: session.worker.rank == 0
    return resolve_on_hardware(CONFIG, session, samples=80).precision


def test_all_ranks_take_what_each_of_them_has(tmp_path: Path) -> None:
    assert run_ranks(2, choice_of_rank, begun(tmp_path)) == ["fp32", "fp32"]


def test_a_cpu_s_units_are_read_from_linux(tmp_path: Path) -> None:
    for name, flags in (("old", "fma avx2 avx512f"), ("new", "avx2 avx512_bf16")):
        (tmp_path / name).write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    assert cpu_facts(str(tmp_path / "old"))["flags"].split() == ["fma", "avx2", "avx512f"]
    assert "avx512_bf16" in cpu_facts(str(tmp_path / "new"))["flags"]
    assert cpu_facts(str(tmp_path / "none")) == {}
    assert [fastest_precision(device, bf16=False) for device in ("cpu", "cuda")] == ["fp32", "fp16"]


@pytest.mark.parametrize(
    ("config", "resize_size"),
    [
        (Config(), 256),
        (Config(image_size=32), 37),
        (Config(image_size=300), 343),
        (Config(image_size=32, resize_size=256), 256),
        (VideoConfig(), 128),
        (VideoConfig(image_size=224), 256),
    ],
)
def test_a_first_start_resizes_by_the_image_size(config: Config | VideoConfig, resize_size: int) -> None:
    assert resolve(config, {}).resize_size == resize_size


@pytest.mark.parametrize(
    ("now", "changed"),
    [
        ({"image_size": 32}, {}),
        ({"image_size": 32, "resize_size": 37}, {"resize_size": (256, 37)}),
        ({"image_size": 64}, {"image_size": (32, 64), "resize_size": (256, 73)}),
    ],
)
def test_a_resume_keeps_its_resize_size(now: Any, changed: Any) -> None:
    settings = asdict(resolve(Config(image_size=32, resize_size=256), {}))
    earlier = PreviousRun(dict(json.loads(json.dumps(settings))), finished=False)
    options = resolve(Config(**now), earlier.settings)
    assert changes(earlier, asdict(options), asdict(options)) == changed


OF_WEIGHTS = {
    "image_size": 240,
    "resize_size": 250,
    "mean": (0.5, 0.4, 0.3),
    "std": (0.2, 0.2, 0.2),
    "interpolation": "bicubic",
}


def inputs_of(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in OF_WEIGHTS}


def test_the_inputs_are_those_of_the_weights() -> None:
    assert inputs_of(resolve(Config(), {}, Facts(weights_inputs=OF_WEIGHTS))) == OF_WEIGHTS
    given = resolve(Config(image_size=224, mean=(0.1, 0.1, 0.1)), {}, Facts(weights_inputs=OF_WEIGHTS))
    assert inputs_of(given) == OF_WEIGHTS | {"image_size": 224, "resize_size": 256, "mean": (0.1, 0.1, 0.1)}
    silent = resolve(Config(), {}, Facts(weights_inputs=dict.fromkeys(OF_WEIGHTS)))
    assert silent == resolve(Config(), {}) and silent.image_size == 224 and silent.interpolation == "bilinear"


@pytest.mark.parametrize("settings", [{}, VideoConfig.usual_inputs, {"mean": None, "std": None}])
def test_clips_are_normalised_as_kinetics_or_the_weights_are(settings: dict[str, Any]) -> None:
    options = resolve(VideoConfig(), settings)
    assert (options.mean, options.std) == (KINETICS_MEAN, KINETICS_STD) and options.image_size == 112
    other = resolve(VideoConfig(), {}, Facts(weights_inputs={"mean": (0.5, 0.4, 0.3), "std": None, "image_size": None}))
    assert (other.mean, other.std) == ((0.5, 0.4, 0.3), KINETICS_STD)


def test_a_resume_keeps_the_inputs_without_the_weights() -> None:
    settings = json.loads(json.dumps(asdict(resolve(Config(), {}, Facts(weights_inputs=OF_WEIGHTS)))))
    assert inputs_of(resolve(Config(), settings)) == OF_WEIGHTS
    assert resolve(Config(interpolation="bilinear"), settings).interpolation == "bilinear"


def test_a_crop_of_less_than_half_of_the_side_is_warned_of() -> None:
    said = crop_warning(Config(image_size=32, resize_size=256))
    assert all(part in said for part in ("--image-size 32", "--resize-size 256", "1.6%", "--resize-size 37")), said
    for config in (Config(image_size=32, resize_size=64), resolve(Config(image_size=32), {}), DetectionConfig()):
        assert crop_warning(config) == ""


def test_a_resume_may_divide_micro_batches_again_and_again() -> None:
    """`config.json` keeps the size with which the run began, and what depends on the global batch stays."""
    begun = resolve(Config(batch_size=32), {}, Facts(samples=100, workers=(1, 1)))
    kept, orders = asdict(begun), []
    for workers, size in ((2, 16), (4, 8), (2, 16), (1, 32), (4, 8)):
        facts = Facts(samples=100, workers=(workers, workers))
        options = resolve(resolve(Config(batch_size=size), kept), kept, facts)
        assert (options.batch_size, options.global_batch_size) == (size, 32)
        assert resolve(options, asdict(options)) == options  # in a worker
        assert options.stream(100).micro_batches_of(0, workers) == 1
        kept = asdict(options)
        orders.append(kept["order_batch_size"])
    assert orders == [32, 32, 32, None, 32]
    with pytest.raises(UsageError, match=mentioning("--batch-size 32 24 16")):
        resolve(Config(batch_size=24, global_batch_size=96), kept).stream(100)


SORTED = np.repeat(np.arange(40), 50)
IN_BLOCKS = Config(name="run", epochs=1, batch_size=8, global_batch_size=64, shuffle_block=8)


def with_window(
    config: Config, samples: int, labels: NDArray[np.int64] | None, kept: Mapping[str, Any] | None = None
) -> Config:
    """The options at a start with these samples, on two workers."""
    return resolve(config, kept or {}, Facts(samples=samples, source=SortedSource.of(), labels=labels, workers=(2, 2)))


def test_a_window_of_blocks_is_chosen_once() -> None:
    options = with_window(IN_BLOCKS, len(SORTED), SORTED)
    window = options.shuffle_window
    assert window and ClassMixing.of(SORTED, options.stream(len(SORTED))).is_enough
    assert with_window(IN_BLOCKS, len(SORTED), None).shuffle_window == 0
    assert with_window(replace(IN_BLOCKS, shuffle_window=3), len(SORTED), SORTED).shuffle_window == 3
    assert with_window(CONFIG, len(SORTED), SORTED).shuffle_window is None
    assert resolve(IN_BLOCKS, asdict(options)).shuffle_window == window
    assert with_window(IN_BLOCKS, len(SORTED), None, {"shuffle_window": window}).shuffle_window == window


class SortedSource(LabeledFiles):
    """Samples sorted by class, of which only the number and the fingerprint matter."""

    fingerprint = "f"

    def __len__(self) -> int:
        return len(SORTED)

    @classmethod
    def of(cls) -> "SortedSource":
        none = np.zeros(0, np.int64)
        return cls(root="", packed_paths=none.astype(np.uint8), offsets=none, labels=SORTED, classes=("a",))


def test_few_classes_in_a_batch_are_warned_of_with_both_numbers() -> None:
    old = replace(IN_BLOCKS, shuffle_window=0)
    mixing = ClassMixing.of(SORTED, old.stream(len(SORTED)))
    said = window_warning(old, len(SORTED), SORTED)
    assert mentions(said, f"{mixing.in_blocks} {mixing.in_full} no --shuffle-block")
    too_large = with_window(replace(IN_BLOCKS, shuffle_block=100), len(SORTED), SORTED)
    assert "try no --shuffle-block" in window_warning(too_large, len(SORTED), SORTED)
    assert window_warning(CONFIG, len(SORTED), SORTED) == window_warning(old, len(SORTED), None) == ""
    many = SORTED.repeat(10)
    assert mentions(window_warning(old, len(many), many), "--shuffle-window 64")
    assert window_warning(with_window(IN_BLOCKS, len(many), many), len(many), many) == ""


def test_the_fastest_installed_loader_is_the_default() -> None:
    """tests/test_install.py has an environment without DALI."""
    told: list[str] = []
    assert resolve(Config(), {}).loader == "dali"
    assert resolve(Config(loader="torch"), {"loader": "dali"}).loader == "torch"
    for config in (Config(), Config(loader="torch"), Config(loader="dali")):
        check_loader(config, told.append)
    assert told == []
