"""The cost of groups: calls on 8 workers, the launch of 16, and `Cluster()`, each against plain Ray in the same run.

python -m benchmarks.runtime.bench_group_calls [--against COMMIT]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import against
from rlinf_core import Cluster, NodePlacementStrategy, Worker

ROUNDS = 15
CALLS = 100
CALLED = 8
LAUNCHED = 16
LAUNCHES = 5
# What missed its goal.
missed: list[str] = []


class Called(Worker):
    def nothing(self) -> None: ...


class Plain:
    def nothing(self) -> None: ...


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _alternating(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Return both in turn, so that what else the machine does meets both."""
    mine, others = [], []
    for _ in range(rounds):
        others.append(_seconds(theirs))
        mine.append(_seconds(ours))
    return mine, others


def _report(what: str, ours: Sequence[float], theirs: Sequence[float], goal: float, per: int = 1) -> None:
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    middle = statistics.median(ratios)
    verdict = _verdict(what, middle <= goal)
    print(
        f"{what:<38} {statistics.median(ours) / per * 1e3:9.2f} ms {statistics.median(theirs) / per * 1e3:9.2f} ms"
        f"   {middle:5.2f}x  ({ratios[0]:.2f} to {ratios[-1]:.2f})   goal <= {goal}x  {verdict}"
    )


def _verdict(what: str, reached: bool) -> str:
    if not reached:
        missed.append(what)
    return "ok" if reached else "MISSED"


def measure_calls(cluster: Cluster, ray: Any) -> None:
    actors = [ray.remote(Plain).options(num_cpus=0).remote() for _ in range(CALLED)]
    ray.get([actor.nothing.remote() for actor in actors])
    with Called.create_group().launch(cluster, NodePlacementStrategy([0] * CALLED), name="called") as group:

        def ours() -> None:
            for _ in range(CALLS):
                group.nothing().wait()

        def theirs() -> None:
            for _ in range(CALLS):
                ray.get([actor.nothing.remote() for actor in actors])

        async def ours_awaited() -> None:
            for _ in range(CALLS):
                await group.nothing()

        async def theirs_awaited() -> None:
            for _ in range(CALLS):
                await asyncio.gather(*(actor.nothing.remote() for actor in actors))

        ours(), theirs()
        _report(f"call on {CALLED} workers", *_alternating(ours, theirs, ROUNDS), goal=1.35, per=CALLS)
        awaited = _alternating(lambda: asyncio.run(ours_awaited()), lambda: asyncio.run(theirs_awaited()), ROUNDS)
        _report(f"awaited call on {CALLED} workers", *awaited, goal=1.35, per=CALLS)
    for actor in actors:
        ray.kill(actor)


def measure_launch(cluster: Cluster, ray: Any) -> None:
    def theirs() -> None:
        actors = [ray.remote(Plain).options(num_cpus=0).remote() for _ in range(LAUNCHED)]
        ray.get([actor.nothing.remote() for actor in actors])
        leave.append(lambda: [ray.kill(actor) for actor in actors])

    def ours() -> None:
        group = Called.create_group().launch(cluster, NodePlacementStrategy([0] * LAUNCHED), name="launched")
        leave.append(group.shutdown)

    leave: list[Callable[[], object]] = []
    mine: list[float] = []
    others: list[float] = []
    for turn in range(2 * LAUNCHES):
        (others if turn % 2 else mine).append(_seconds(theirs if turn % 2 else ours))
        leave.pop()()
        # Their processes end in the background; the next launch shall not pay for that.
        time.sleep(3)
    _report(f"launch of {LAUNCHED} workers without torch", mine, others, goal=1.5)


def main() -> int:
    import ray

    from rlinf_core.cluster import engine

    inside: list[float] = []
    plain_init = ray.init

    def timed_init(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return plain_init(*args, **kwargs)
        finally:
            inside.append(time.perf_counter() - began)

    ray.init = timed_init
    added: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        cluster = Cluster(num_nodes=1)
        added.append(time.perf_counter() - began - inside.pop())
        if len(added) < 3:
            cluster.shutdown()
    ray.init = plain_init
    middle = statistics.median(added)
    print(
        f"{'Cluster() beyond ray.init':<38} {middle * 1e3:9.2f} ms   ({min(added) * 1e3:.0f} to {max(added) * 1e3:.0f})"
        f"   goal <= 500 ms  {_verdict('Cluster()', middle <= 0.5)}"
    )
    assert engine.current() is not None
    with cluster:
        measure_calls(cluster, ray)
        measure_launch(cluster, ray)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(against.main(main, __file__, ()))
