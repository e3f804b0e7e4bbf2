"""The time from Enter to the first step of `rlinf train recipe=embodied`, against a bare script on Ray.

The bare script starts Ray and as many actors as a run has processes, the manager's and the channel's included, two of
which import torch, as a policy's do. CPU seconds are those of all processes until the first step.

    python benchmarks/runtime/bench_first_step.py [--rounds 3] [--against COMMIT]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import against
from benchmarks.table import Result, run_parts

# The last line of the bare script, and the line of the first step of a run.
READY, FIRST_STEP = "ready", "step 1/"
BARE = f"""
import ray

class Actor:
    def __init__(self, computes):
        if computes:
            import torch

    def ready(self):
        pass

ray.init(address="local", include_dashboard=False, logging_level=40)
actors = [ray.remote(Actor).options(num_cpus=0).remote(number < 2) for number in range(5)]
ray.get([actor.ready.remote() for actor in actors])
print({READY!r}, flush=True)
"""
GOAL_SECONDS, GOAL_RATIO = 6.0, 1.15
TICKS = os.sysconf("SC_CLK_TCK")


class Start(NamedTuple):
    """One start.

    Attributes:
        seconds: until the line was there.
        cpu: CPU seconds of all processes until then.
        parts: CPU seconds by kind of process.
    """

    seconds: float
    cpu: float
    parts: dict[str, float]


def start_of(command: list[str], line: str, folder: str) -> Start:
    """Start a program, and end it when it has printed a line that begins like this.

    Raises:
        RuntimeError: it ended before.
    """
    # A variable that all processes below it inherit, by which they are found.
    mark = f"RLINF_BENCHMARK_START={time.monotonic_ns()}"
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    name, value = mark.split("=")
    environment[name] = value
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder
    ) as process:
        printed_lines: list[str] = []
        for printed in process.stdout or ():
            printed_lines.append(printed)
            if printed.startswith(line):
                break
        else:
            raise RuntimeError("".join(printed_lines))
        seconds = time.perf_counter() - began
        parts = cpu_by_kind(mark)
        for _ in process.stdout or ():
            pass
    return Start(seconds, sum(parts.values()), parts)


def cpu_by_kind(mark: str) -> dict[str, float]:
    """Return CPU seconds of the processes that have a variable in their environment, by what they are."""
    parts: dict[str, float] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() not in (entry / "environ").read_bytes():
                continue
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        kind = kind_of(command)
        parts[kind] = parts.get(kind, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS
    return parts


def kind_of(command: str) -> str:
    """Return what a process is, from its command line."""
    if (command.startswith("ray::") and "Agent" not in command) or "default_worker" in command:
        return "workers"
    if "gcs_server" in command.split(" ")[0] or "raylet/raylet" in command.split(" ")[0]:
        return "Ray's servers"
    return "Ray's helpers" if "Agent" in command or "/ray/" in command else "driver"


def measure(rounds: int) -> dict[str, list[Start]]:
    """Return the starts of every program, one of each per round; a first round only fills the caches."""
    train = [str(Path(sys.executable).with_name("rlinf")), "train", "recipe=embodied", "runner.max_steps=1"]
    programs = {"bare Ray": ([sys.executable, "-c", BARE], READY), "now": (train, FIRST_STEP)}
    starts_of: dict[str, list[Start]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, (command, line) in programs.items():
            with tempfile.TemporaryDirectory() as folder:
                start = start_of(command, line, folder)
            if number:
                starts_of[name].append(start)
    return starts_of


def results(rounds: int) -> Iterator[Result]:
    """Yield a line for each program, and the ratios."""
    starts_of = measure(rounds)
    middle = {name: median(start.seconds for start in starts) for name, starts in starts_of.items()}
    for name, starts in starts_of.items():
        cpu = median(start.cpu for start in starts)
        kinds = sorted({kind for start in starts for kind in start.parts})
        parts = ", ".join(f"{kind} {median(start.parts.get(kind, 0.0) for start in starts):.1f}" for kind in kinds)
        goal = f"<= {GOAL_SECONDS:g} s" if name == "now" else ""
        met = name != "now" or middle[name] <= GOAL_SECONDS
        yield Result(
            f"{name}: seconds to the first step", f"{cpu:.1f} cpu-s: {parts}", f"{middle[name]:.1f}", goal, met
        )
    ratio = middle["now"] / middle["bare Ray"]
    yield Result(
        "now against bare Ray", "medians of wall time", f"{ratio:.2f}x", f"<= {GOAL_RATIO:g}x", ratio <= GOAL_RATIO
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each program (default 3)")
    rounds = max(1, parser.parse_args().rounds)
    return run_parts({"start": lambda: results(rounds)}, None)


if __name__ == "__main__":
    sys.exit(against.main(main, __file__, ("--rounds", "1")))
