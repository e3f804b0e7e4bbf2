"""The time to find the best placement of an embodied job, and the cost of recording its calls.

    python benchmarks/embodied/bench_advice.py

Placements are searched on 16 nodes of two kinds, and on 1,000 nodes of two kinds, 8 accelerators each. The cost of a
recording is what a timed call with rows takes, its clock included, times the calls of a step of the
job `embodied/pick-laptop`, of whose seconds it is a share. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.table import Result, run_parts
from recipes.embodied.embodied_flow import HOP, POLICY, STEP, UPDATE, VALUES, flow_of
from rlinf_core.job.arrangements import DeviceGroup, candidates, search
from rlinf_core.job.flow import Duration, Durations
from rlinf_core.job.load import load_job
from rlinf_core.worker.timer import forget_calls, recording, timer

PER_NODE: Final = 8
ROUNDS: Final = 2
# Environments of the job, nodes of each kind, and the seconds that a search may take.
CLUSTERS: Final = ((1024, 8, 1.0), (64_000, 500, 10.0))
# Seconds of a call, fixed and for each row, on the slower kind; the other one is twice as fast.
LINES: Final = {STEP: (0.4, 0.01), POLICY: (0.05, 0.002), VALUES: (0.05, 0.002), UPDATE: (0.05, 0.004)}
CALLS: Final = 200_000
# Of a process of `embodied/pick-laptop`: timed calls of a step, 50 actions with a wait, a step and an answer each; and
# the seconds of a step.
CALLS_OF_A_STEP: Final = 2 * 50 + 40
SECONDS_OF_A_STEP: Final = 0.185


def searched() -> Iterator[Result]:
    """Yield what it takes to search clusters."""
    for environments, nodes, goal in CLUSTERS:
        words = [f"env.train.total_num_envs={environments}", f"actor.global_batch_size={environments}"]
        config: Any = load_job("embodied/pick-laptop", [*words, "runner.val_check_interval=-1"]).config
        kinds = tuple(DeviceGroup(label, nodes * PER_NODE, PER_NODE, label) for label in ("slow", "fast"))
        durations = Durations(
            {
                **{phase: {"slow": (line := Duration(*fit)), "fast": line.faster(2)} for phase, fit in LINES.items()},
                HOP: {"": Duration(0.01)},
            }
        )
        job = flow_of(config)
        spent: list[float] = []
        for _ in range(ROUNDS):
            began = time.process_time()
            flow = job.flow(durations, {kind.label: kind.model for kind in kinds})
            where = candidates(flow, dict.fromkeys(job.components, kinds), job.stages, (0, 1), job.legal)
            result = search(flow, where)
            spent.append(time.process_time() - began)
        seconds = min(spent)
        best = result.best[0]
        counts = ", ".join(f"{name} {seats.kind}:{seats.size}" for name, seats in best.arrangement.seats)
        yield Result(
            f"the best of {result.judged:,} placements on {2 * nodes:,} nodes",
            f"{result.simulated} simulated; {counts}",
            f"{seconds:.2f} s",
            f"<= {goal:g} s",
            seconds <= goal and result.proven,
        )


def recorded() -> Iterator[Result]:
    """Yield what the record of a call costs."""

    def seconds(rows: int) -> float:
        began = time.process_time()
        with recording():
            for _ in range(CALLS):
                with timer("env/step", rows):
                    pass
        return (time.process_time() - began) / CALLS

    whole = min(seconds(32) for _ in range(5))
    forget_calls()
    share = 100 * whole * CALLS_OF_A_STEP / SECONDS_OF_A_STEP
    yield Result(
        "timed calls, share of a step of `embodied/pick-laptop`",
        f"{1e6 * whole:.2f} us a call, {CALLS_OF_A_STEP} calls a step of {SECONDS_OF_A_STEP} s",
        f"{share:.2f} %",
        "< 0.3 %",
        share < 0.3,
    )


if __name__ == "__main__":
    sys.exit(run_parts({"search": searched, "record": recorded}, sys.argv[1] if len(sys.argv) > 1 else None))
