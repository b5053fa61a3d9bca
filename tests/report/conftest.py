"""What is printed, to a pipe or to a terminal."""

import pytest

from tests.support.console import Output


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Output:
    """What was printed since the last call, to a pipe that rich believes to be 40 columns wide."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    return lambda: capsys.readouterr().out


@pytest.fixture
def on_terminal(output: Output, monkeypatch: pytest.MonkeyPatch) -> Output:
    """As output, but to a terminal of 100 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return output
