"""Promise: `rlinf` answers at once.

`rlinf --help` against an interpreter that imports typer, rich and click, and does nothing; `rlinf validate hetero18`
against one that imports typer, rich, pydantic and ruamel.yaml and makes a model with one field, for these load most of
their code at first use. One more program shows the floor: a Typer command that makes the model and reads one line of
YAML. All take turns within one run; what counts is the ratio of the medians of their CPU seconds, which other work
moves least.

    python benchmarks/runtime/bench_startup.py [--rounds 30] [--against COMMIT]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles

from benchmarks import against

RLINF = Path(sys.executable).with_name("rlinf")
_TYPER = "typer, rich, click"
_MODEL_MADE = "one pydantic model"
_LIBRARIES = "import typer, rich, pydantic, ruamel.yaml"
_MODEL = "class Model(pydantic.BaseModel):\n    number: int = 1\nModel()"
_COMMAND = """
app = typer.Typer(rich_markup_mode=None)
@app.command()
def command(file: str):
    class Model(pydantic.BaseModel):
        number: int = 1
    Model(**ruamel.yaml.YAML(typ="safe", pure=True).load(file))
app()
"""
COMMANDS: dict[str, list[str]] = {
    _TYPER: [sys.executable, "-c", f"import {_TYPER}"],
    _MODEL_MADE: [sys.executable, "-c", f"{_LIBRARIES}\n{_MODEL}"],
    "one command, model, line": [sys.executable, "-c", f"{_LIBRARIES}\n{_COMMAND}", "number: 2"],
    "rlinf --help": [str(RLINF), "--help"],
    "rlinf validate hetero18": [str(RLINF), "validate", "hetero18"],
}
# An installed package is compiled; the first round, which is not counted, compiles a checkout.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
# The program that a command is held against, and the largest ratio that we promise.
GOALS = {"rlinf --help": (_TYPER, 1.3), "rlinf validate hetero18": (_MODEL_MADE, 1.6)}


def seconds(command: list[str]) -> float:
    """CPU seconds of one run.

    Raises:
        subprocess.CalledProcessError: it did not end with exit code 0, so that its time means nothing.
    """
    nowhere = subprocess.DEVNULL
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=_ENVIRONMENT, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the times of every command, one of each per round; a first round only fills the caches."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for index in range(rounds + 1):
        for name, command in COMMANDS.items():
            taken = seconds(command)
            if index:
                times[name].append(taken)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="runs of each command (default 30)")
    rounds = max(2, parser.parse_args().rounds)
    times = measure(rounds)
    print(f"{rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    print(f"{'':26}{'median':>10}{'quartiles':>18}{'ratio':>8}{'goal':>8}")
    kept = True
    for name, taken in times.items():
        low, middle, high = (f"{value * 1000:.0f}" for value in quantiles(taken, n=4))
        line = f"{name:26}{middle + ' ms':>10}{f'{low}-{high} ms':>18}"
        if name in GOALS:
            base, goal = GOALS[name]
            ratio = median(taken) / median(times[base])
            kept &= ratio <= goal
            line += f"{ratio:>8.2f}{goal:>8.1f}"
        print(line)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(against.main(main, __file__, ("--rounds", "5")))
