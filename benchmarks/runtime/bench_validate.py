"""Promise: a 10,000-line file is checked in under 2 s, and twice the lines take about twice the time.

    python benchmarks/runtime/bench_validate.py

Prints one line for each size: lines, seconds from text to findings (the best of three), and the growth since the line
before, which is 2 where the cost is proportional to the size. Exits with 1 when the promise is not kept.
"""

from __future__ import annotations

import gc
import sys
import time

from rlinf_cli.job.job_file import load_with_lint

SIZES = (2500, 5000, 10_000, 20_000)
GOAL_LINES, GOAL_SECONDS = 10_000, 2.0
ROUNDS = 3
# Lines that one node group takes below.
_LINES_PER_GROUP = 8


def text(lines: int) -> bytes:
    """Return a valid file of about that many lines: one node group a node, each with its own environment."""
    groups = lines // _LINES_PER_GROUP
    parts = [
        f"cluster:\n  num_nodes: {groups}\n  component_placement:\n    actor: {{node_group: node, placement: all}}"
    ]
    parts.append("  node_groups:")
    parts.extend(
        f"    - label: group{rank}\n"
        f"      node_ranks: {rank}\n"
        "      accelerators: {model: A800, per_node: 8}\n"
        "      env_configs:\n"
        f"        - node_ranks: {rank}\n"
        f"          python_interpreter_path: /opt/venv{rank}/bin/python3\n"
        "          env_vars:\n"
        f"            - NCCL_SOCKET_IFNAME: eth{rank}"
        for rank in range(groups)
    )
    return "\n".join(parts).encode()


def best_of(data: bytes) -> float:
    seconds: list[float] = []
    for _ in range(ROUNDS):
        gc.collect()
        start = time.perf_counter()
        job = load_with_lint("-", stdin=data)
        seconds.append(time.perf_counter() - start)
        if not job.ok:
            raise SystemExit("the file that is measured is not valid")
    return min(seconds)


def main() -> int:
    print(f"{'lines':>8} {'seconds':>9} {'growth':>7} {'goal':>6}")
    before: float | None = None
    kept = True
    for size in SIZES:
        data = text(size)
        seconds = best_of(data)
        growth = f"{seconds / before:7.2f}" if before else f"{'-':>7}"
        goal = f"{GOAL_SECONDS:6.1f}" if size == GOAL_LINES else ""
        kept &= size != GOAL_LINES or seconds < GOAL_SECONDS
        lines = data.count(b"\n") + 1
        print(f"{lines:>8} {seconds:>9.3f} {growth} {goal}")
        before = seconds
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
