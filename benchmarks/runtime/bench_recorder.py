"""The cost of the flight recorder, which keeps the last operations of every process, and of supervision.

The recorder is switched within one run: of each two steps one has it, the first or the second by chance, so that
nothing that comes at regular intervals is taken for it. The CPU time of all worker processes in a step with it is
compared with that of its neighbour without it, so that neither differences between runs nor slow changes of the machine
count. Of those differences the fifth at each end is left out, which other programs of the machine make; the mean of the
others is given with its standard error.

Supervision is the CPU time of the manager, and of the thread of each worker that answers it, in the same steps.

    python benchmarks/runtime/bench_recorder.py [embodied|math] [--steps 1000]
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

from benchmarks.meter import cpu_seconds
from benchmarks.table import Result, run_parts
from recipes.embodied.loop.protocols import EmbodiedActor, EmbodiedEnv, EmbodiedRollout
from recipes.language.loop.worker_groups import GenerationGroup, LanguageActorGroup, RewardGroup
from rlinf_core.job.load import load_job
from rlinf_core.runners import events
from rlinf_core.runners.events import Event
from rlinf_core.runners.run_program import run_job
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.worker import WorkerReference

GOAL_PERCENT: Final = 1.0
# As in `recorder_workers`, which imports torch.
FLAG: Final = "flag"
SUPERVISED: Final = "supervised-"
_WORKERS: Final = "benchmarks.runtime.recorder_workers"
_WARM_UP: Final = 20
_TRIMMED: Final = 0.2


class Measured(NamedTuple):
    """A job to measure.

    Attributes:
        program: the module of its recipe's program.
        file: the shipped file.
        workers: what the names of the program's worker classes stand for here.
        overrides: what makes its steps short.
    """

    program: str
    file: str
    workers: dict[str, WorkerReference[Any]]
    overrides: tuple[str, ...]


RECIPES: Final = {
    "embodied": Measured(
        "recipes.embodied.program",
        "embodied/pick-laptop",
        {
            "ACTOR": WorkerReference(f"{_WORKERS}:SwitchedActor", EmbodiedActor, "actor"),
            "ROLLOUT": WorkerReference(f"{_WORKERS}:SwitchedRollout", EmbodiedRollout, "rollout"),
            "ENV": WorkerReference(f"{_WORKERS}:SwitchedEnv", EmbodiedEnv, "env"),
        },
        (
            *("env.train.task=reach", "env.train.total_num_envs=8", "env.train.max_episode_steps=25"),
            *("env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=40", "algorithm.update_epoch=1"),
        ),
    ),
    "math": Measured(
        "recipes.math.program",
        "math/sums-laptop",
        {
            "ACTOR": WorkerReference(f"{_WORKERS}:SwitchedLanguageActor", LanguageActorGroup, "actor"),
            "ROLLOUT": WorkerReference(f"{_WORKERS}:SwitchedLanguageRollout", GenerationGroup, "rollout"),
            "REWARD": WorkerReference(f"{_WORKERS}:SwitchedReward", RewardGroup, "reward"),
        },
        ("data.rollout_batch_size=8", "actor.warm_start.steps=0"),
    ),
}


class Steps:
    """Switches the recorder after each step, and notes the CPU seconds of steps with and without it.

    Args:
        flag: its first byte says whether the recorder is on.
        folder: the folder with the files of `SUPERVISED`.
        last: the last step.

    Attributes:
        seconds: whether a step had it, and its CPU seconds.
        supervision: CPU seconds of supervision before the first of these steps, and after the last.
    """

    def __init__(self, flag: mmap.mmap, folder: Path, last: int) -> None:
        self._flag, self._folder, self._end = flag, folder, last
        self._drawn = random.Random(0)
        self._pids: Sequence[int] = ()
        self._last: float | None = None
        self.seconds: list[tuple[bool, float]] = []
        self.supervision = 0.0, 0.0

    def __call__(self, event: Event) -> None:
        if not isinstance(event, events.StepFinished):
            return
        if not self._pids:
            # The processes of the run, without Ray's own and the driver.
            background: set[int] = set()
            self._pids = [pid for pid in cpu_seconds(background) if pid not in background]
        now = sum(map(precise_seconds, self._pids))
        if self._last is not None and event.step > _WARM_UP:
            self.seconds.append((bool(self._flag[0]), now - self._last))
        if event.step == _WARM_UP:
            self.supervision = supervision_seconds(self._folder), 0.0
        elif event.step == self._end:
            self.supervision = self.supervision[0], supervision_seconds(self._folder)
        self._flag[0] = self._drawn.random() < 0.5 if event.step % 2 == 0 else not self._flag[0]
        self._last = sum(map(precise_seconds, self._pids))


def precise_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, to the nanosecond."""
    total = 0
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            total += int(Path(task.path, "schedstat").read_text(encoding="ascii").split()[0])
    except OSError:  # it, or a thread of it, has ended
        pass
    return total / 1e9


def supervision_seconds(folder: Path) -> float:
    """Return the CPU seconds so far of the manager, and of the workers' threads that answer it."""
    managers: set[int] = set()
    for pid in cpu_seconds():
        if b"ManagerProcess" in Path(f"/proc/{pid}/cmdline").read_bytes():
            managers.add(pid)
    tasks = [Path(f"/proc/{pid}/task") for pid in managers]
    threads = [task for manager in tasks for task in manager.iterdir()]
    for file in folder.glob(f"{SUPERVISED}*"):
        pid = file.name.removeprefix(SUPERVISED)
        threads += [Path(f"/proc/{pid}/task/{thread}") for thread in file.read_text(encoding="ascii").split()]
    return sum(int((thread / "schedstat").read_text(encoding="ascii").split()[0]) for thread in threads) / 1e9


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


def results(recipe: str, steps: int) -> Iterator[Result]:
    """Measure one recipe."""
    chosen, last = RECIPES[recipe], steps + _WARM_UP
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, FLAG)
        path.write_bytes(b"\1")
        # Of the workers, too, which import `benchmarks`.
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        with path.open("r+b") as file:
            flag = mmap.mmap(file.fileno(), 1)
        program: Any = importlib.import_module(chosen.program)
        for name, worker in chosen.workers.items():
            setattr(program, name, worker)
        job = load_job(
            chosen.file,
            (
                *(f"runner.logger.log_path={folder}", f"runner.max_steps={last}"),
                *("runner.val_check_interval=-1", "runner.save_interval=-1"),
                *chosen.overrides,
            ),
            environ={},
        )
        job.raise_if_bad()
        config: Any = job.config
        measured = Steps(flag, Path(folder), last)
        run_job(job, RunFolder.create(config.runner, config.recipe), measured, program.launch)
    relative = differences(measured.seconds)
    mean, error = (100 * value for value in trimmed_mean(relative))
    seconds = [value for _, value in measured.seconds]
    shown = (
        f"{mean:+.2f} +- {error:.2f} % (trimmed mean, standard error; {len(relative)} pairs), "
        f"of {1000 * fmean(seconds):.1f} ms of CPU"
    )
    name, most = f"{recipe}: the flight recorder, of the workers' CPU time", mean + 2 * error
    yield Result(name, shown, f"{most:.2f} %", f"< {GOAL_PERCENT:g} %", most < GOAL_PERCENT)
    before, after = measured.supervision
    share = 100 * (after - before) / sum(seconds)
    shown = f"{after - before:.2f} s of {sum(seconds):.1f} s in {len(seconds)} steps"
    name = f"{recipe}: supervision, of the workers' CPU time"
    yield Result(name, shown, f"{share:.2f} %", f"< {GOAL_PERCENT:g} %", share < GOAL_PERCENT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", choices=list(RECIPES))
    parser.add_argument("--steps", type=int, default=1000)
    chosen = parser.parse_args()
    parts = {recipe: lambda recipe=recipe: results(recipe, chosen.steps) for recipe in RECIPES}
    return run_parts(parts, chosen.only)


if __name__ == "__main__":
    sys.exit(main())
