"""Start a process of a Ray of raydali's own, in place of Ray's program of this name, which imports Ray for a second.

The process is a fork of this Ray's server (process_server.py). Where the job has another runtime environment than the
driver gives it, Ray's own program starts it.
"""

import json
import os
import runpy
import shlex
import sys
from pathlib import Path

PROCESS_SERVER = str(Path(__file__).with_name("process_server.py"))
"""Run by its path, as this file is: to import raydali takes longer."""
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main(program: str, *arguments: str) -> None:
    """Run a program of Ray.

    Args:
        program: its path, beside which Ray's own program of this name is.
        arguments: those of the program, and Ray's description of the environment.
    """
    described = next((each.removeprefix(CONTEXT) for each in arguments if each.startswith(CONTEXT)), "{}")
    context = {name: value for name, value in json.loads(described).items() if value}
    python, variables = context.pop("py_executable", ""), context.pop("env_vars", {})
    ours = f"{shlex.join([sys.executable, PROCESS_SERVER])} "
    if context or not python.startswith(ours):
        os.execv(sys.executable, [sys.executable, str(Path(program).with_name(Path(__file__).name)), *sys.argv[1:]])
    for name, value in variables.items():
        os.environ[name] = os.path.expandvars(value)
    server, ask = shlex.split(python.removeprefix(ours)), runpy.run_path(PROCESS_SERVER)["main"]
    ask(*server, program, *(each for each in arguments if not each.startswith((CONTEXT, LANGUAGE))))


if __name__ == "__main__":
    main(*sys.argv[1:])
