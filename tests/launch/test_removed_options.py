"""An option or a command that was removed is refused, and the message says what replaced it."""

from dataclasses import dataclass

import pytest

from raydali import cli
from raydali.errors import UsageError
from raydali.launch.removed_options import REMOVED, refuse_removed_command, refuse_removed_options
from tests.support.messages import mentioning


@dataclass(frozen=True, kw_only=True)
class Options:
    """A job's options."""

    workers: int = 1
    keep: bool = True


@pytest.mark.parametrize("given", ["--replace", "--no-replace", "--replace=True", "--spares 2", "--spares=2"])
def test_a_removed_option_is_refused_with_what_replaced_it(given: str) -> None:
    option = given.partition("=")[0].partition(" ")[0]
    with pytest.raises(UsageError, match=mentioning(f"{option} checkpoint --checkpoint-every")):
        refuse_removed_options(["--workers", "2", *given.split()], Options)


def test_an_option_that_exists_is_never_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(Options):
        replace: bool = False
        spares: int = 0

    refuse_removed_options(["--no-replace", "--spares", "2", "--no-keep", "--unknown"], Own)


def test_an_option_of_one_command_is_not_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "bench train --overlap", "both ways are as fast")
    refuse_removed_options(["--overlap"], Options, "bench loader")
    with pytest.raises(UsageError, match="both ways are as fast"):
        refuse_removed_options(["--no-overlap"], Options, "bench train")


def test_a_removed_command_is_refused_and_others_are_not() -> None:
    with pytest.raises(UsageError, match=mentioning("bench goodput restart")):
        refuse_removed_command(["bench", "goodput", "--help"], ())
    refuse_removed_command(["chaos", "--kills", "2"], ["chaos"])
    refuse_removed_command(["bench", "train"], ())


@pytest.mark.parametrize("key", [key for key in REMOVED if not key.startswith("-") and key not in cli.COMMANDS])
def test_the_command_line_names_what_replaced_a_command(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, option = key.partition(" --")
    given = [*command.split(), *([f"--{option}"] if option else [])]
    with pytest.raises(SystemExit) as left:
        cli.main(given)
    said = capsys.readouterr().err
    assert left.value.code == 2 and REMOVED[key] in said


@pytest.mark.parametrize("key", REMOVED)
def test_a_message_is_short(key: str) -> None:
    assert len(f"error: raydali {key} was removed: {REMOVED[key]}") <= 160
