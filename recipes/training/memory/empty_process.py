"""The memory of processes before they hold anything of a job: programs that do with little what a worker does."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Mapping
from typing import Final

from rlinf_core import ConfigError
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.process.import_path import module_command
from rlinf_core.process.process_memory import PeakMeter

# Bytes that a worker holds besides what such a program measures: its connections to Ray and to its peers. Measured.
CONNECTED: Final = 45 * 2**20
_PATIENCE_SECONDS: Final = 300.0


def measure_empty_process(program: str, *arguments: str, given: bytes = b"") -> Mapping[str, int]:
    """Return the bytes of a process of a component before it holds anything of a job, by phase.

    Args:
        program: module that prints peaks in bytes by phase, as JSON, in its last line.
        arguments: of the program.
        given: its standard input.

    Raises:
        ConfigError: the program failed.
    """
    command = [*module_command(program), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, timeout=_PATIENCE_SECONDS, check=False)
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise ConfigError("the memory of an empty process cannot be measured", why=last)
    measured: dict[str, int] = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return {phase: size + CONNECTED for phase, size in measured.items()}


def import_worker(meter: PeakMeter, *modules: str) -> None:
    """Import, in such a program, what every worker does and some modules besides: the phase `start`."""
    with meter.during("start"):
        ray_api()
        for module in ("rlinf_core.worker.process", *modules):
            importlib.import_module(module)
