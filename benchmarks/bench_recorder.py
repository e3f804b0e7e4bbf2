"""The cost of the flight recorder, which keeps the last operations of every process for `recent.txt`.

It is switched within one run: of each two steps one has it, the first or the second by chance, so that nothing that
comes at regular intervals is taken for it. The CPU time of all worker processes in a step with it is compared with that
of its neighbour without it, so that neither differences between runs nor slow changes of the machine count. Of those
differences the fifth at each end is left out, which other programs of the machine make; the mean of the others is given
with its standard error.

    python benchmarks/bench_recorder.py [--steps 1000]
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from meter import cpu_seconds
from table import Result, run_parts

import recipes.embodied.program as program
from recipes.embodied.loop.filming_runner import FilmedEnv
from recipes.embodied.loop.protocols import EmbodiedActor, EmbodiedRollout
from rlinf_core import WorkerReference
from rlinf_core.job.load import load_job
from rlinf_core.runners import events
from rlinf_core.runners.events import Event
from rlinf_core.runners.run_program import run_job
from rlinf_core.runners.storage.run_folder import RunFolder

GOAL_PERCENT: Final = 1.0
# As in `recorder_workers`, which imports torch.
FLAG: Final = "flag"
_WORKERS: Final = "benchmarks.recorder_workers"
_WARM_UP: Final = 20
_TRIMMED: Final = 0.2


class Steps:
    """Switches the recorder after each step, and notes the CPU seconds of steps with and without it."""

    def __init__(self, flag: mmap.mmap) -> None:
        self._flag = flag
        self._drawn = random.Random(0)
        self._last: float | None = None
        self.seconds: list[tuple[bool, float]] = []

    def __call__(self, event: Event) -> None:
        if not isinstance(event, events.StepFinished):
            return
        now = sum(map(precise_seconds, cpu_pids()))
        if self._last is not None and event.step > _WARM_UP:
            self.seconds.append((bool(self._flag[0]), now - self._last))
        self._flag[0] = self._drawn.random() < 0.5 if event.step % 2 == 0 else not self._flag[0]
        self._last = sum(map(precise_seconds, cpu_pids()))


_pids: list[int] = []


def cpu_pids() -> Sequence[int]:
    """Return the processes of the run, without Ray's own and the driver; looked up once."""
    if not _pids:
        background: set[int] = set()
        _pids.extend(pid for pid in cpu_seconds(background) if pid not in background)
    return _pids


def precise_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, to the nanosecond."""
    total = 0
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            total += int(Path(task.path, "schedstat").read_text(encoding="ascii").split()[0])
    except OSError:  # it, or a thread of it, has ended
        pass
    return total / 1e9


def differences(seconds: Sequence[tuple[bool, float]]) -> list[float]:
    """Return the relative differences of neighbours, one with and one without the recorder."""
    pairs = zip(seconds[::2], seconds[1::2], strict=False)
    mean = fmean(value for _, value in seconds)
    return [(a - b if on else b - a) / mean for (on, a), (other, b) in pairs if on != other]


def trimmed_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean without a fifth of the values at each end, and its standard error (Tukey and McLaughlin)."""
    ordered = sorted(values)
    out = int(_TRIMMED * len(ordered))
    kept = ordered[out : len(ordered) - out]
    winsorized = [kept[0]] * out + kept + [kept[-1]] * out
    return fmean(kept), stdev(winsorized) / ((1 - 2 * _TRIMMED) * sqrt(len(ordered)))


def results(steps: int) -> Iterator[Result]:
    """Measure the recipe embodied."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, FLAG)
        path.write_bytes(b"\1")
        # Of the workers, too, which import `benchmarks`.
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        with path.open("r+b") as file:
            flag = mmap.mmap(file.fileno(), 1)
        program.ACTOR = WorkerReference(f"{_WORKERS}:SwitchedActor", EmbodiedActor, "actor")
        program.ROLLOUT = WorkerReference(f"{_WORKERS}:SwitchedRollout", EmbodiedRollout, "rollout")
        program.ENV = WorkerReference(f"{_WORKERS}:SwitchedEnv", FilmedEnv, "env")
        job = load_job(
            "laptop",
            (
                *(f"runner.logger.log_path={folder}", f"runner.max_steps={steps + _WARM_UP}", "env.train.task=reach"),
                *("env.train.total_num_envs=8", "env.train.max_episode_steps=25", "algorithm.update_epoch=1"),
                *("env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=40"),
                *("runner.val_check_interval=-1", "runner.save_interval=-1"),
            ),
            environ={},
        )
        job.raise_if_bad()
        config: Any = job.config
        measured = Steps(flag)
        launch: Callable[..., Any] = program.launch
        run_job(job, RunFolder.create(config.runner, config.recipe), measured, launch)
    relative = differences(measured.seconds)
    mean, error = (100 * value for value in trimmed_mean(relative))
    step = 1000 * fmean(seconds for _, seconds in measured.seconds)
    shown = (
        f"{mean:+.2f} +- {error:.2f} % (trimmed mean, standard error; {len(relative)} pairs), of {step:.1f} ms of CPU"
    )
    name = "embodied: the flight recorder, of the workers' CPU time"
    yield Result(name, shown, f"{mean + 2 * error:.2f} %", f"< {GOAL_PERCENT:g} %", mean + 2 * error < GOAL_PERCENT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    chosen = parser.parse_args()
    return run_parts({"embodied": lambda: results(chosen.steps)}, None)


if __name__ == "__main__":
    sys.exit(main())
