"""A recipe's settings are options of the job, and the micro-batch follows the global batch and the workers."""

import json
from dataclasses import MISSING, asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.imagenet import Config, build_model
from raydali.errors import UsageError
from raydali.options.defaults import Facts, resolve
from raydali.training.models.classification import on_meta
from raydali.training.optim import build_optimizer
from raydali.training.recipe import RECIPES, Settings, find_recipe, micro_batch
from tests.support.messages import mentioning, mentions
from tests.support.quick import first_quick


def config_of(name: str) -> Config:
    return Config(recipe=name, **find_recipe(name).options())


def at_a_start(config: Config, workers: int, **kept: int) -> Config:
    return resolve(config, kept, Facts(workers=(1, workers)))


def test_settings_are_options_with_their_defaults() -> None:
    options = {field.name: field.default for field in fields(Config)}
    assert {field.name for field in fields(Settings)} <= options.keys()
    defaults = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}
    assert {name for name, default in defaults.items() if options[name] != default} == {"interpolation"}


@first_quick("name", RECIPES)
def test_every_recipe_builds(name: str) -> None:
    config = config_of(name)
    model = on_meta(lambda: build_model(config, 10))
    settings = config.optimizer_settings(lambda classes: build_model(config, classes), 10)
    for workers in (1, 2, 8):
        given = at_a_start(config, workers)
        stream = given.stream(1_281_167)
        assert stream.micro_batches_of(workers - 1, workers) >= 1 and given.batch_size <= config.batch_size
        peak = given.peak(stream.global_batch_size)
        optimizer = build_optimizer(model=model, learning_rate=peak, **settings)
        assert optimizer.param_groups[0]["lr"] == peak == config.learning_rate
    assert [*find_recipe(name).differences(json.loads(json.dumps(asdict(config))))] == []


@given(st.integers(1, 10_000), st.integers(1, 1000), st.integers(1, 300))
def test_the_micro_batch_divides_fits_and_suffices_for_all_workers(batch: int, most: int, workers: int) -> None:
    size = micro_batch(batch, most, workers)
    if workers > batch:
        assert size == 1
        return
    assert batch % size == 0 and size <= most and batch // size >= workers
    larger = [n for n in range(size + 1, most + 1) if batch % n == 0 and batch // n >= workers]
    assert larger == []


def test_workers_beyond_the_global_batch_are_refused() -> None:
    with pytest.raises(UsageError, match=mentioning("9 workers 8 micro-batches --workers --global-batch-size")):
        config = at_a_start(replace(config_of("fashion"), global_batch_size=8), 9)
        config.stream(100).micro_batches_of(0, 9)


def test_a_resume_keeps_the_micro_batch_and_a_given_one_wins() -> None:
    config = config_of("fashion")
    assert at_a_start(config, 8).batch_size == 64
    assert resolve(replace(config, workers="1:8"), {}).batch_size == 64
    assert at_a_start(config, 2, batch_size=64).batch_size == 64
    assert at_a_start(replace(config, batch_size=128), 8).batch_size == 128
    assert at_a_start(Config(global_batch_size=512), 8).batch_size == Config.batch_size


def test_differences_are_listed_as_options() -> None:
    config = replace(config_of("fashion"), epochs=30, nesterov=False, augment="none", flip_probability=0.0, name="x")
    phrases = [*find_recipe("fashion").differences(asdict(config))]
    assert phrases == [
        "--epochs 30 instead of 180",
        "--flip-probability 0.0 instead of 0.5",
        "--augment none instead of trivial",
        "--no-nesterov instead of --nesterov",
    ]


@pytest.mark.parametrize("name", ["fashon", "Fashion", "x"])
def test_an_unknown_recipe_names_near_ones(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        Config(recipe=name)
    assert mentions(str(caught.value), f"--recipe {name} fashion")
