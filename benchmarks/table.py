"""The table of a benchmark whose parts run one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


class Result(NamedTuple):
    """One line of the table."""

    what: str
    measured: str
    figure: str
    goal: str
    met: bool


def run_parts(parts: Mapping[str, Callable[[], Iterable[Result]]], only: str | None) -> int:
    """Run all parts, or only the one of that name, print their results, and return the exit status."""
    print(f"{'what':60} {'figure':>9} {'goal':>9}      measured")
    missed = 0
    for name, part in parts.items():
        if only not in (None, name):
            continue
        for result in part():
            missed += not result.met
            mark = "ok" if result.met else "MISSED"
            print(f"{result.what:60} {result.figure:>9} {result.goal:>9} {mark:6} {result.measured}", flush=True)
    return 1 if missed else 0
