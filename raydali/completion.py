"""`raydali completion`: what a shell needs in order to complete raydali's commands and options.

    raydali completion bash > ~/.local/share/bash-completion/completions/raydali
    raydali completion zsh > "${fpath[1]}/_raydali"
    raydali completion fish > ~/.config/fish/completions/raydali.fish

tyro makes it from the same dataclasses as the help.
"""

from dataclasses import dataclass
from typing import Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that completes raydali's commands and options in bash, zsh or fish."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell."""


def main(options: Completion) -> None:
    """Print it."""
    from raydali import cli

    cli.main(["--tyro-print-completion", options.shell])
