"""Stored starts of a simulator, checked against its tasks' own descriptions, in the simulator's interpreter.

    python -m recipes.embodied.interpreters.start_check ENV_TYPE STARTS TASK...

prints a record in JSON for each task once it is done: see `check_starts`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from recipes.embodied.config.env_types import ENV_TYPES
from recipes.embodied.envs.simulators.packages import versions_of
from recipes.embodied.interpreters.locked_venvs import NOT_PASSED, SetupError
from rlinf_core import ConfigError
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.suggest import quoted

_MODULE: Final = "recipes.embodied.interpreters.start_check"


def require_stored_starts(env_type: str) -> None:
    """Check that a simulator has stored starts.

    Raises:
        ConfigError: the simulator has none.
    """
    if env_type not in ENV_TYPES or not ENV_TYPES[env_type].stored_sets:
        stored = quoted(name for name, known in ENV_TYPES.items() if known.stored_sets)
        raise ConfigError(
            f"`{env_type}` has no stored starts to check",
            why="a start is checked where its makers stored it as a state, beside a description of what should hold in"
            " it; other simulators draw each start themselves, under the physics that then runs",
            help=f"starts are stored for {stored}",
        )


def check_starts(
    env_type: str, python: Path, tasks: Sequence[str], starts: int, emit: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Try stored starts in an interpreter.

    Args:
        env_type: an environment type that `require_stored_starts` accepts.
        python: the interpreter that has the simulator.
        tasks: tasks and sets of tasks; empty: all with stored starts.
        starts: the number of starts per task, spread over its list.
        emit: receives progress lines.

    Returns:
        A record for each task: `set` and `task`; `starts`, the numbers of the starts tried; `faults`, a list of [start,
        fault]; `seconds`; `versions` of the packages.

    Raises:
        SetupError: the simulator does not run there.
    """
    command = [str(python), "-P", "-m", _MODULE, env_type, str(starts), *tasks]
    environment = {name: value for name, value in os.environ.items() if name not in NOT_PASSED}
    records: list[dict[str, Any]] = []
    failure = SetupError(f"`{python}` cannot check the starts of `{env_type}`")
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
            )
        except OSError as error:
            failure.why, failure.help = error.strerror, f"run `rlinf venv setup {env_type}`, or name one with `--path`"
            raise failure from None
        with process:
            assert process.stdout is not None
            # Simulators print to standard output, too.
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                record = load_json_object(line)
                if "fault" in record:
                    failure.why, failure.help = record["fault"], f"run `rlinf venv setup {env_type}`"
                    continue
                records.append(record)
                faulty = len({start for start, _ in record["faults"]})
                emit(f"{record['task']}: {faulty} of {len(record['starts'])} starts do not hold")
        if process.returncode:
            errors.seek(0)
            failure.why = failure.why or (errors.read().strip().splitlines() or ["it printed nothing"])[-1]
            raise failure
    return records


def _records(env_type: str, starts: int, tasks: Sequence[str]) -> Iterator[dict[str, Any]]:
    from recipes.embodied.envs.processes.simulator import Start, options_of, simulation_class
    from recipes.embodied.envs.registry import env_class

    kind: Any = simulation_class(getattr(env_class(env_type), "simulation"))  # noqa: B009 - of simulators
    options = options_of(kind, {"cameras": ()})
    for name in tasks or ENV_TYPES[env_type].stored_sets:
        for task in kind.tasks(name, options):
            began = time.monotonic()
            simulation = kind(task, options)
            count = min(starts, simulation.stored_starts)
            numbers = [index * simulation.stored_starts // count for index in range(count)]
            faults: list[tuple[int, str]] = []
            for number in numbers:
                if number:  # the constructor begins start 0
                    simulation.reset(Start(0, number))
                faults += [(number, fault) for fault in simulation.faults_of_start()]
            simulation.close()
            yield {
                "set": name,
                "task": task,
                "starts": numbers,
                "faults": faults,
                "seconds": round(time.monotonic() - began, 1),
                "versions": versions_of(env_type),
            }


if __name__ == "__main__":
    try:
        for done in _records(sys.argv[1], int(sys.argv[2]), sys.argv[3:]):
            print(json.dumps(done), flush=True)
    except ConfigError as error:
        print(json.dumps({"fault": f"{error.message}: {error.help}"}), flush=True)
        sys.exit(1)
