"""A job's training loop: what it may not leave out."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from jobs.imagenet import Config, Data, train_pipeline, val_pipeline
from raydali.data.load.make import make_loader
from raydali.errors import UsageError
from raydali.host.hardware import PrecisionName
from raydali.launch.worker.session import Session
from raydali.launch.worker.step import Step
from raydali.launch.worker.training_run import TrainingRun
from raydali.run.checkpoints import CheckpointStore
from raydali.run.find import newest_first, step_of
from raydali.run.folder import RunFolder
from raydali.run.messages import Progress
from raydali.training.forward_backward import ForwardBackward
from tests.support.digits import SHORT, digits_data
from tests.support.ranks import LocalSession, Stopped, folder_of, run_ranks

CONFIG = replace(SHORT, epochs=1, ceiling=False, name="run")


@cache
def every_third_digit() -> Data:
    digits = digits_data()
    return Data(*(all.drop([id for id in range(len(all)) if id % 3]) for all in (digits.train, digits.val)))


class Loop:
    """A whole loop; each test overrides a method with one that leaves something out."""

    def __init__(self, path: Path | RunFolder, config: Config = CONFIG, stop_at: int | None = None) -> None:
        self.config, self.data = config, every_third_digit()
        self.session = LocalSession(folder_of(path) if isinstance(path, Path) else path, stop_at=stop_at)
        self.run = TrainingRun(config, self.session, samples=len(self.data.train))
        self.model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def register(self) -> None:
        self.run.register_state(model=self.model, optimizer=self.optimizer)

    def differentiated(self) -> ForwardBackward:
        criterion = nn.CrossEntropyLoss()
        return self.run.differentiated(self.model, lambda images, labels: criterion(self.model(images / 255), labels))

    def batches(self, step: Step, differentiated: ForwardBackward) -> None:
        for batch in step:
            self.backward(step, differentiated, batch)

    def backward(self, step: Step, differentiated: ForwardBackward, batch: Any) -> None:
        step.backward(differentiated, batch["images"], batch["labels"])

    def update(self, step: Step) -> None:
        step.update(self.optimizer)

    def end_epoch(self) -> None:
        with self.run.validation():
            metrics = {"top1": 0.5}
        self.close(metrics)

    def close(self, metrics: dict[str, float]) -> None:
        self.run.close_epoch(metrics, score="top1", weights=self.model)

    def train(self) -> None:
        self.register()
        differentiated = self.differentiated()
        with self.run.loaders(self.data, (train_pipeline(self.config), val_pipeline(self.config))) as (loader, _):
            for step in self.run.steps(loader):
                self.batches(step, differentiated)
                self.update(step)
                if step.ends_epoch:
                    self.end_epoch()


@pytest.mark.parametrize(("seconds", "saved"), [(600.0, [4, 2, 1]), (None, [4])])
def test_a_short_run_saves_the_first_checkpoints_in_its_first_epoch(
    tmp_path: Path, seconds: float | None, saved: list[int]
) -> None:
    loop = Loop(tmp_path)
    loop.session.short_seconds = seconds
    loop.train()
    loop.session.checkpoints.finish()
    assert [step_of(name) for name in newest_first(loop.session.folder)] == saved
    (row,) = loop.session.folder.rows("epochs.jsonl")
    assert (row["checkpoint_seconds"] > 0) == (seconds is not None)


def test_the_epochs_of_a_short_run_do_not_wait_for_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch that is shorter than writing a checkpoint would wait for it, and a plan take this for every epoch's."""
    write, save = CheckpointStore._write, CheckpointStore.save
    begun: list[int] = []
    written: list[int] = []
    second_epoch_ends = threading.Event()

    class Slow(Loop):
        def end_epoch(self) -> None:
            if len(begun) == 3:
                second_epoch_ends.set()
            super().end_epoch()

    def late(self: CheckpointStore, unsaved: Any) -> None:
        if len(begun) == 3:  # the first epoch's
            assert second_epoch_ends.wait(15)
            time.sleep(1)
        write(self, unsaved)
        written.append(unsaved.step)

    def after_others(self: CheckpointStore, step: int, *args: Any, **options: Any) -> None:
        assert written == begun
        begun.append(step)
        save(self, step, *args, **options)

    monkeypatch.setattr(CheckpointStore, "_write", late)
    monkeypatch.setattr(CheckpointStore, "save", after_others)
    loop = Slow(tmp_path, replace(CONFIG, epochs=2))
    loop.session._waits_for_saves = False
    loop.session.short_seconds = 600.0
    loop.train()
    assert len(begun) == 4


@pytest.fixture(autouse=True, scope="module")
def unfrozen() -> Iterator[None]:
    """A run freezes all objects, also its loaders, which are to be collected after these tests."""
    yield
    gc.unfreeze()


def nothing(*_: Any) -> None:
    """What was forgotten."""


def twice(call: Callable[..., Any]) -> Callable[..., None]:
    def called(*args: Any) -> None:
        call(*args)
        call(*args)

    return called


def test_a_whole_loop_trains_to_the_end(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train()
    (row,) = loop.session.folder.rows("epochs.jsonl")
    assert loop.session.steps_left == 0
    assert row["step"] == loop.run.stream.steps and row["validation"]["top1"] == 0.5 and row["learning_rate"] == 0.1


def test_a_micro_batch_that_is_too_large_is_named_with_one_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 5 samples the loss fails as PyTorch does; one sample takes 2 GiB of 80.

    What the loss had computed when it failed is free before smaller sizes are measured.
    """

    def failing(most: int) -> Loop:
        loop = Loop(tmp_path)

        def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            computed = images / 255
            if len(images) > most:
                failed.append(weakref.ref(computed))
                raise torch.OutOfMemoryError("CUDA out of memory")
            taken.append(len(images))
            return nn.functional.cross_entropy(loop.model(computed), labels)

        monkeypatch.setattr(loop, "differentiated", lambda: loop.run.differentiated(loop.model, loss))
        return loop

    def memory(_: torch.device) -> dict[str, int]:
        assert failed and all(each() is None for each in failed)
        return {"held": 4 * gib, "others": 2 * gib, "total": 80 * gib, "peak": (4 + 2 * taken[-1]) * gib}

    taken, failed, gib = list[int](), list[weakref.ref[torch.Tensor]](), 2**30
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr("raydali.training.forward_backward.memory_of", memory)
    with pytest.raises(UsageError, match="--batch-size 16 does not fit into the GPU's memory: about 32 would fit"):
        failing(5).train()
    with pytest.raises(UsageError, match="no smaller one was found that fits"):
        failing(0).train()


@pytest.mark.slow
def test_only_some_epochs_are_validated(tmp_path: Path) -> None:
    """After a resume in an epoch that is not validated, too; the last epoch always is."""
    config = replace(CONFIG, epochs=6, validate_every=4)
    stream = config.stream(len(every_third_digit().train))
    with suppress(Stopped):
        Loop(tmp_path, config, stop_at=stream.end_step(1) + 1).train()
    loop = Loop(tmp_path, config)
    loop.train()
    rows = loop.session.folder.rows("epochs.jsonl")
    assert [row["validation"] and row["validation"]["top1"] for row in rows] == [None, None, None, 0.5, None, 0.5]
    assert [row["step"] for row in rows] == [stream.end_step(epoch) for epoch in range(6)]
    assert loop.session.folder.exists("best/model.safetensors")


def test_a_resume_needs_the_weights_of_each_network_but_those_of_an_average(tmp_path: Path) -> None:
    """A function that builds a network draws none of its weights then."""
    before, empty = Loop(tmp_path), torch.amp.GradScaler("cpu", enabled=False)  # whose state is empty
    before.register = lambda: before.run.register_state(  # type: ignore[method-assign]
        model=before.model, optimizer=before.optimizer, scaler=empty
    )
    before.train()
    loop = Loop(tmp_path)
    loop.run.register_state(model=loop.model, optimizer=loop.optimizer, scaler=torch.amp.GradScaler("cpu"))
    loop = Loop(tmp_path)
    others = {"average": AveragedModel(loop.model), "head": loop.run.prepared(lambda: nn.Linear(2, 2))}
    with pytest.raises(UsageError, match=r"no weights of head: give another --name"):
        loop.run.register_state(model=loop.model, optimizer=loop.optimizer, **others)


@pytest.mark.slow
def test_a_validation_is_compiled_if_it_pays_and_by_a_resume_only_when_it_validates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first start does so before its first step: what does not fit into memory fails then."""
    config = replace(CONFIG, epochs=3, compile=True)
    stream, samples = config.stream(len(every_third_digit().train)), len(every_third_digit().val)
    monkeypatch.setattr("raydali.training.forward_backward.compile_function", lambda function, **_: function)

    def steps_before(folder: str, stop_at: int | None, pays_from: int) -> list[int]:
        """Return how many steps of the run were done at each preparation."""
        loop, prepared = Loop(tmp_path / folder, config, stop_at), list[int]()
        warm_up = "raydali.training.evaluation.validation.ValidationForward.warm_up"
        monkeypatch.setattr(warm_up, lambda *_, compiled, graph: prepared.append(loop.session.cursor.done))
        monkeypatch.setattr("raydali.launch.worker.rehearsal.COMPILED_VALIDATION_PAYS_FROM", pays_from)
        loop.run.inference(loop.model)
        with suppress(Stopped):
            loop.train()
        return prepared

    batches = -(-samples // config.batch_size)
    assert steps_before("a", stream.end_step(0) + 1, 3 * batches) == [0]
    assert steps_before("a", None, 2 * batches) == [stream.end_step(1)]
    assert steps_before("b", None, 3 * batches + 1) == []


class Scored(Loop):
    """A loop whose validations find these scores, by epoch; those of other ranks than 0 count for nothing."""

    def __init__(self, path: Path | RunFolder, scores: list[float], **options: Any) -> None:
        super().__init__(path, replace(CONFIG, epochs=6, batch_size=48, loader="synthetic", **options))
        self.scores = scores

    def end_epoch(self) -> None:
        epoch = self.run.stream.epoch_closed_by(self.session.cursor.done - 1)
        assert epoch is not None
        with self.run.validation():
            score = float("nan") if self.run.worker.rank else self.scores[epoch]
        self.close({"top1": score})

    def epochs(self) -> list[int]:
        """Train, and return the epochs in the run's folder; a checkpoint covers the last one if it ended."""
        with suppress(Stopped):
            self.train()
            self.session.checkpoints.finish()
            assert self.session.steps_left == 0
            assert step_of(newest_first(self.session.folder)[0]) == self.session.cursor.done
        return [row["epoch"] for row in self.session.folder.rows("epochs.jsonl")]


def test_a_run_ends_when_its_score_does_not_improve_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    """Across cuts: in an epoch, and between the last validation and its checkpoint."""
    scores = [0.5, 0.7, 0.6, 0.7, 0.6, 0.9]
    assert Scored(tmp_path / "whole", scores, patience=2).epochs() == [0, 1, 2, 3]
    cut = Scored(tmp_path / "cut", scores, patience=2)
    cut.session._stop_at = cut.run.stream.end_step(2) + 2
    assert cut.epochs() == [0, 1, 2]

    def fail(*_: Any, **__: Any) -> None:
        raise Stopped

    unsaved = Scored(tmp_path / "cut", scores, patience=2)
    unsaved.run._checkpoint = fail  # type: ignore[method-assign]
    assert unsaved.epochs() == [0, 1, 2]
    ended = Scored(tmp_path / "cut", scores, patience=2)
    assert ended.epochs() == [0, 1, 2, 3]
    assert ended.session.early_end == "no better score for 2 validations, best in epoch 1"
    again = Scored(tmp_path / "cut", scores, patience=2)
    again.backward = fail  # type: ignore[method-assign]
    assert again.epochs() == [0, 1, 2, 3] and again.session.early_end == ended.session.early_end
    more = Scored(tmp_path / "cut", scores, patience=4)
    assert more.epochs() == [*range(6)] and more.session.early_end is None


def scored_rank(folder: RunFolder, scores: list[float]) -> tuple[int, str | None]:
    loop = Scored(folder, scores, patience=1)
    loop.epochs()
    return loop.session.cursor.done, loop.session.early_end


def test_all_ranks_end_early_at_the_same_step(tmp_path: Path) -> None:
    ends = run_ranks(2, scored_rank, folder_of(tmp_path), [0.5, 0.7, 0.6])
    assert ends == [(3 * 479 // 96 + 1, "no better score for 1 validation, best in epoch 1")] * 2


def test_the_progress_counts_to_where_the_run_stops(tmp_path: Path) -> None:
    session, stream = LocalSession(folder_of(tmp_path)), replace(CONFIG, epochs=6).stream(1437)
    session._channel, session.most_epochs, session.cursor.done = MagicMock(), 2, 1
    Session.report_progress(session, stream)
    (message,) = session.messages
    assert isinstance(message, Progress) and (message.steps, message.epochs) == (stream.end_step(1), 2)


@pytest.mark.parametrize(
    ("part", "call"),
    [
        ("register", "run.register_state"),
        ("batches", "micro-batches were not trained on"),
        ("backward", "step.backward"),
        ("update", "step.update"),
        ("end_epoch", "run.close_epoch"),
        ("close", "run.close_epoch"),
    ],
)
def test_a_forgotten_call_is_named(tmp_path: Path, part: str, call: str) -> None:
    loop = Loop(tmp_path)
    setattr(loop, part, nothing)
    with pytest.raises(UsageError, match=call):
        loop.train()
    assert not loop.session.folder.rows("epochs.jsonl")


@pytest.mark.parametrize(
    ("part", "call"), [("backward", "step.backward"), ("update", "step.update"), ("close", "run.close_epoch")]
)
def test_a_call_made_twice_is_named(tmp_path: Path, part: str, call: str) -> None:
    loop = Loop(tmp_path)
    setattr(loop, part, twice(getattr(loop, part)))
    with pytest.raises(UsageError, match=call):
        loop.train()


def test_metrics_need_a_validation_in_its_context(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.end_epoch = lambda: loop.close({"top1": 1.0})  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"run\.validation"):
        loop.train()


def test_the_score_is_one_of_the_metrics(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.close = lambda metrics: loop.run.close_epoch(metrics, score="map", weights=loop.model)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"'map'.*top1"):
        loop.train()


def test_an_epoch_is_not_closed_before_its_end(tmp_path: Path) -> None:
    loop = Loop(tmp_path)

    def update(step: Step) -> None:
        step.update(loop.optimizer)
        if not step.is_warm_up:
            loop.end_epoch()

    loop.update = update  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="ends_epoch"):
        loop.train()


def test_a_loader_of_another_order_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.register()
    pipeline, order = train_pipeline(CONFIG), replace(loop.run.stream, seed=1)
    with (
        make_loader("torch", loop.data.train, pipeline, order) as other,
        pytest.raises(UsageError, match=r"run\.loaders"),
    ):
        next(iter(loop.run.steps(other)))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_are_clipped_to_a_norm(tmp_path: Path, precision: PrecisionName) -> None:
    """In fp16 they are unscaled before."""
    loop = Loop(tmp_path, replace(CONFIG, precision=precision))
    moved: list[float] = []

    def update(step: Step) -> None:
        before = nn.utils.parameters_to_vector(loop.model.parameters()).detach().clone()
        step.update(loop.optimizer, max_norm=1e-3)
        after = nn.utils.parameters_to_vector(loop.model.parameters()).detach()
        moved.append((after - before).norm().item())

    loop.update = update  # type: ignore[method-assign]
    loop.train()
    assert max(moved) == pytest.approx(0.1 * 1e-3, rel=0.01)
