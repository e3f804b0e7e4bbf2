"""The time from the death of a worker until work continues: by its rank alone, against a restart of the whole run.

Workers are killed with -9 in the midst of a step. "One start" is the launch and preparation of one such process, alone,
in the same session. The restart is that after the death of an actor, which cannot be started again alone, with a
checkpoint after every step. What a snapshot costs is measured in a run that takes one as often as it may.

    python benchmarks/runtime/bench_recovery.py [embodied|math|agent] [--rounds 3] [--against COMMIT]
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import against
from benchmarks.table import Result, run_parts
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.job.load import load_job
from rlinf_core.runners import events
from rlinf_core.runners.events import Event
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.run_program import run_job
from rlinf_core.runners.storage.run_folder import RunFolder

GOAL_SECONDS, GOAL_RATIO, GOAL_PERCENT = 4.0, 1.5, 1.0
# Of each recipe: its program, its file, who is killed alone, and in what of the file a step takes about a second.
RECIPES = {
    "embodied": ("recipes.embodied.program", "embodied/pick-laptop", ("env", "rollout"), ()),
    "math": ("recipes.math.program", "math/sums-laptop", ("reward", "rollout"), ("runner.save_format=dcp",)),
    "agent": (
        "recipes.agent.agent_runner",
        "agent/calculator-laptop",
        ("agent", "reward"),
        ("runner.save_format=dcp",),
    ),
}
# Steps before the first death, and between two deaths.
_STEPS = 2
# Steps of a run with snapshots, which takes minutes.
_SNAPSHOT_STEPS = 800


class Recovery(NamedTuple):
    """One death, and how it went on.

    Attributes:
        seconds: until the work of the step began again, or the dead one's share of it.
        again: steps that had been finished, and were done again.
        alone: whether only the dead was started again.
    """

    component: str
    seconds: float
    again: int
    alone: bool


class Deaths:
    """Kills workers of a run in turn, each in the midst of a step, and notes when work continues."""

    def __init__(self, victims: Sequence[str]) -> None:
        self.left = list(victims)
        self.recoveries: list[Recovery] = []
        self.runner: Any = None
        self._killed: tuple[str, float] | None = None
        self._next, self._highest = _STEPS + 1, 0
        self._again, self._restarted = 0, False

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, events.StepFinished):
            if event.step <= self._highest and self.recoveries:
                last = self.recoveries[-1]
                self.recoveries[-1] = last._replace(again=last.again + 1)
            self._highest = max(self._highest, event.step)
        elif isinstance(event, events.RunRestarted):
            self._restarted = True
        elif isinstance(event, events.WorkersRelaunched):
            self._goes_on(now, alone=True)
        elif isinstance(event, events.PhaseStarted) and event.phase == events.GENERATE_ROLLOUTS:
            if self._restarted:
                self._restarted = False
                self._goes_on(now, alone=False)
            elif self._killed is None and self.left and event.step >= self._next:
                # In the midst of the phase, which takes longer than this.
                threading.Timer(0.05, self._kill, (self.left.pop(0),)).start()

    def _kill(self, component: str) -> None:
        group: Any = self.runner.groups[component]
        self._killed = component, time.monotonic()
        os.kill(group._members[0].pid, signal.SIGKILL)

    def _goes_on(self, now: float, *, alone: bool) -> None:
        if self._killed is not None:
            (component, since), self._killed = self._killed, None
            self.recoveries.append(Recovery(component, now - since, 0, alone))
            self._next = self._highest + 1 + _STEPS


def recoveries(recipe: str, folder: Path, rounds: int) -> tuple[list[Recovery], dict[str, float]]:
    """Return what became of the deaths of a run, and the seconds of one start of each component."""
    module, file, alone, overrides = RECIPES[recipe]
    program: Any = importlib.import_module(module)
    victims = [component for _ in range(rounds) for component in (*alone, "actor")]
    job = load_job(
        file,
        (
            f"runner.logger.log_path={folder}",
            f"runner.max_steps={(_STEPS + 2) * (len(victims) + 1)}",
            f"runner.max_restarts={len(victims)}",
            "runner.val_check_interval=-1",
            "runner.save_interval=1",
            *overrides,
        ),
        environ={},
    )
    job.raise_if_bad()
    config: Any = job.config
    deaths = Deaths(victims)
    starts: dict[str, float] = {}

    def launch(config: Any, cluster: Cluster, record: RunRecord) -> Any:
        runner = deaths.runner = program.launch(config, cluster, record)
        run = runner.run

        def run_and_start() -> None:
            run()
            for component in alone:
                began = time.monotonic()
                runner.groups[component].relaunch(0)
                runner.groups[component].execute_on(0).init_worker(*prepared_with(runner, component)).wait()
                starts[component] = time.monotonic() - began

        runner.run = run_and_start
        return runner

    run_job(job, RunFolder.create(config.runner, config.recipe), deaths, launch)
    return deaths.recoveries, starts


def prepared_with(runner: Any, component: str) -> tuple[Any, ...]:
    """Return the arguments of `init_worker` of a component."""
    recovery = runner._recovery
    if hasattr(recovery, "starts"):
        layout, spec = recovery.starts
        return (layout,) if component == "env" else (layout, spec)
    return (recovery._layout,)


def snapshots() -> Iterator[Result]:
    """Measure what share of a run its snapshots take, from the end of the first to that of the last, where each is
    saved as soon as it may."""
    module, file, _, overrides = RECIPES["embodied"]
    program: Any = importlib.import_module(module)
    # When each began and ended.
    saved: list[tuple[float, float]] = []

    def launch(config: Any, cluster: Cluster, record: RunRecord) -> Any:
        runner = program.launch(config, cluster, record)
        save = runner.save_checkpoint

        def timed(step: int | None = None, *, snapshot: bool = False) -> None:
            start = time.monotonic()
            save(step, snapshot=snapshot)
            if snapshot:
                saved.append((start, time.monotonic()))

        runner.save_checkpoint = timed
        return runner

    with tempfile.TemporaryDirectory() as folder:
        job = load_job(
            file,
            (
                *(f"runner.logger.log_path={folder}", f"runner.max_steps={_SNAPSHOT_STEPS}"),
                *("runner.snapshot_interval=1s", "runner.save_interval=1000", "runner.val_check_interval=-1"),
                *overrides,
            ),
            environ={},
        )
        job.raise_if_bad()
        config: Any = job.config
        run_job(job, RunFolder.create(config.runner, config.recipe), lambda event: None, launch)
    later = [ended - began for began, ended in saved[1:]]
    period = saved[-1][1] - saved[0][1] if later else 1.0
    share = 100 * sum(later) / period
    measured = f"{len(later)} of {median(later):.2f} s in {period:.0f} s" if later else "there was no second one"
    met = bool(later) and share < GOAL_PERCENT
    yield Result("embodied: snapshots, of the time", measured, f"{share:.2f} %", f"< {GOAL_PERCENT:g} %", met)


def results(recipe: str, rounds: int) -> Iterator[Result]:
    """Measure one recipe."""
    with tempfile.TemporaryDirectory() as folder:
        deaths, starts = recoveries(recipe, Path(folder), rounds)
    restart = median(recovery.seconds for recovery in deaths if not recovery.alone)
    for component in RECIPES[recipe][2]:
        own = [recovery for recovery in deaths if recovery.component == component and recovery.alone]
        times, again = sorted(recovery.seconds for recovery in own), sum(recovery.again for recovery in own)
        seconds = median(times)
        name, spread = f"{recipe}: death of {component} until work goes on", f"{times[0]:.1f} to {times[-1]:.1f} s"
        measured = f"{spread}; a restart of all: {restart:.1f} s"
        yield Result(name, measured, f"{seconds:.1f} s", f"<= {GOAL_SECONDS:g} s", seconds <= GOAL_SECONDS)
        ratio = seconds / starts[component]
        share = f"one start: {starts[component]:.1f} s"
        yield Result(f"{name}, by one start", share, f"{ratio:.2f}x", f"<= {GOAL_RATIO:g}x", ratio <= GOAL_RATIO)
        yield Result(f"{recipe}: finished steps done again", f"{len(own)} deaths", str(again), "0", not again)
    if recipe == "embodied":
        yield from snapshots()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", choices=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()

    def part(recipe: str) -> Iterable[Result]:
        return results(recipe, chosen.rounds)

    return run_parts({recipe: lambda recipe=recipe: part(recipe) for recipe in RECIPES}, chosen.only)


if __name__ == "__main__":
    sys.exit(against.main(main, __file__, ("math", "--rounds", "1")))
