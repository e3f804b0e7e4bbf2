"""Asynchronous steps of a language model against synchronous ones, where some answers take much longer than others.

    python -m benchmarks.language.bench_async_language [--seeds 0 1 2] [--steps 60]

The engine of the rollout worker is the product's; this script holds each answer back for a time of heavy-tailed length
(Pareto, shape 1.2, from 20 ms to 0.5 s), as if it were that long, and sleeps meanwhile. Synchronous steps wait for the
longest of 256 answers; with `runner.max_staleness: 2` the prompts of two later steps are under way. Both modes train
the model of `math/sums-laptop` on the same problems, one after the other, with the same seeds. The times are of steps
after the first five. Exits with 1 when an asynchronous step takes more than 0.6 times as long as a synchronous one,
or when the rewards of the last ten steps differ by more than twice their standard error over the seeds (and 0.03).
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from benchmarks.language.bench_math import AS_BASELINES
from recipes.language.answers.sequences import Request, Sequence
from recipes.language.engines.engine import Engine, EngineStats, PauseMode
from recipes.language.loop.worker_groups import GenerationGroup
from recipes.language.workers.rollout_worker import LanguageRolloutWorker
from recipes.math import program
from rlinf_core import Cluster
from rlinf_core.job.load import load_job
from rlinf_core.runners import events
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.worker import WorkerReference

SHORTEST, LONGEST, SHAPE = 0.02, 0.5, 1.2
FIRST, LAST = 5, 10
LIMIT, NOISE = 0.6, 0.03


class SlowEngine(Engine):
    """An engine whose answers come late, each by its own time. The time does not depend on the mode or the batch.

    Args:
        engine: the engine that generates.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun: dict[tuple[str, int], float] = {}
        self._held: list[tuple[float, Sequence]] = []

    def submit(self, request: Request) -> None:
        for sample in range(request.group_size):
            self._begun[request.request_id, sample] = time.monotonic() + duration(request, sample)
        self._engine.submit(request)

    def step(self) -> list[Sequence]:
        self._hold(self._engine.step())
        if not self._engine.unfinished and self._held:
            # As an engine that decodes: it looks for orders every few milliseconds.
            time.sleep(min(0.003, max(0.0, min(due for due, _ in self._held) - time.monotonic())))
        return self._due()

    def _hold(self, answers: list[Sequence]) -> None:
        self._held += [(self._begun.pop((answer.request_id, answer.sample)), answer) for answer in answers]

    def _due(self) -> list[Sequence]:
        now = time.monotonic()
        done = [answer for due, answer in self._held if due <= now]
        self._held = [(due, answer) for due, answer in self._held if due > now]
        return done

    @property
    def unfinished(self) -> int:
        return self._engine.unfinished + len(self._held)

    def pause(self, mode: PauseMode) -> list[Sequence]:
        self._hold(self._engine.pause(mode))
        while mode != "freeze" and self._held:
            time.sleep(0.003)
            self._held = [answer for answer in self._held if answer[0] > time.monotonic()]
        return self._due()

    def resume(self) -> None:
        self._engine.resume()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, adapter_only: bool = False) -> str:
        return self._engine.load_weights(tensors, version, adapter_only=adapter_only)

    def sleep(self, level: int = 1) -> None:
        self._engine.sleep(level)

    def wake(self) -> None:
        self._engine.wake()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def stop(self) -> None:
        self._engine.stop()


def duration(request: Request, sample: int) -> float:
    """Return how many seconds an answer takes: heavy-tailed, the same in every run with the same seed."""
    rng = random.Random(f"{request.params.seed} {request.prompt} {sample}")
    return min(LONGEST, SHORTEST * rng.paretovariate(SHAPE))


class SlowRollout(LanguageRolloutWorker):
    """The rollout worker of the recipe, with the engine above."""

    def make_engine(self, stops: tuple[int, ...]) -> Engine:
        return SlowEngine(super().make_engine(stops))


def run(cluster: Cluster, seed: int, steps: int, staleness: int) -> tuple[list[float], list[float], float]:
    """Return the seconds between the ends of steps, the reward of each, and the mean staleness of the tokens."""
    ends: list[float] = []
    rewards: list[float] = []
    ages: list[float] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.StepFinished):
            ends.append(time.monotonic())
            rewards.append(event.metrics["rollout/reward"])
            ages.append(event.metrics["rollout/staleness_mean"])

    with tempfile.TemporaryDirectory() as folder:
        job = load_job(
            "math/sums-laptop",
            (
                f"actor.seed={seed}",
                f"data.seed={seed}",
                f"runner.max_steps={steps}",
                *AS_BASELINES,
                f"runner.max_staleness={staleness}",
                "runner.val_check_interval=-1",
                "runner.save_interval=-1",
                "runner.save_format=dcp",
                f"runner.logger.log_path={folder}",
            ),
            environ={},
        )
        job.raise_if_bad()
        config: Any = job.config
        with RunRecord.open(job, RunFolder.create(config.runner, "math"), listen) as record:
            runner = program.launch(config, cluster, record)
            try:
                runner.init_workers()
                runner.run()
            finally:
                runner.shutdown()
    return [after - before for before, after in itertools.pairwise(ends)], rewards, statistics.fmean(ages)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    program.ROLLOUT = WorkerReference[GenerationGroup](
        "benchmarks.language.bench_async_language:SlowRollout", GenerationGroup, "rollout"
    )
    times: dict[int, list[float]] = {0: [], 2: []}
    final: dict[int, list[float]] = {0: [], 2: []}
    print(f"{'seed':>4}  {'mode':<12}  {'s/step':>7}  {'first reward':>12}  {'last reward':>11}  {'staleness':>9}")
    with Cluster(num_nodes=1) as cluster:
        for seed in args.seeds:
            for staleness, name in ((0, "synchronous"), (2, "asynchronous")):
                seconds, rewards, age = run(cluster, seed, args.steps, staleness)
                times[staleness].append(statistics.median(seconds[FIRST:]))
                final[staleness].append(statistics.fmean(rewards[-LAST:]))
                first = statistics.fmean(rewards[:FIRST])
                print(
                    f"{seed:>4}  {name:<12}  {times[staleness][-1]:>7.3f}  {first:>12.3f}"
                    f"  {final[staleness][-1]:>11.3f}  {age:>9.2f}",
                    flush=True,
                )
    ratio = statistics.fmean(times[2]) / statistics.fmean(times[0])
    difference = statistics.fmean(final[2]) - statistics.fmean(final[0])
    spread = [statistics.stdev(rewards) if len(rewards) > 1 else 0.0 for rewards in final.values()]
    error = (sum(rewards**2 for rewards in spread) / len(args.seeds)) ** 0.5
    print(f"step time: {ratio:.2f} of a synchronous step's (at most {LIMIT})")
    print(f"reward of the last {LAST} steps: {difference:+.3f}, standard error {error:.3f}")
    return 1 if ratio > LIMIT or abs(difference) > max(NOISE, 2 * error) else 0


if __name__ == "__main__":
    sys.exit(main())
