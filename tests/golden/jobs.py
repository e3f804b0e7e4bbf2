"""Jobs of `rlinf` as processes of their own, with arithmetic that every processor repeats, and what they measure.

The order in which a kernel adds depends on the processor. The jobs use kernels that every processor has: with these,
switching off what numpy, oneDNN and the C library choose by processor left every metric the same bits, while one
differing bit in a logit makes a language model draw another token. Metrics are compared bitwise where the processor
and the build of torch are those that they were frozen with, elsewhere to a tolerance and with a warning: vendors'
processors differ in last bits even so, and Adam, which divides by the size of a gradient, makes whole steps of those.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import pytest

from tests.golden.command_line import REPOSITORY
from tests.golden.frozen import IS_REWRITING, check_frozen, read_frozen

# Kernels that every processor of the architecture has.
ARITHMETIC: Final = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
# What the clock and the machine make.
_MEASURED: Final = re.compile(r"^(time|speed|memory)/|_per_second$")
_TOLERANCE: Final = 1e-3
# Of jobs whose three steps took other last bits further: 3.6 % between AMD's and Intel's, in a divergence.
_TOLERANCES: Final = {"math/sums-laptop": 0.05}


def run_rlinf(*words: str, folder: Path) -> None:
    """Run a command of this checkout in `folder`, and fail where it fails."""
    environ = {name: os.environ[name] for name in ("PATH", "HOME")} | ARITHMETIC
    environ |= {"PYTHONPATH": str(REPOSITORY), "RLINF_REPORT": "0"}
    command = [sys.executable, "-m", "rlinf_cli", *words]
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]


def check_metrics(name: str, file: Path) -> None:
    """Compare all metrics of a run, `file`, with those frozen under `name`, but for what a machine makes."""
    steps: list[dict[str, Any]] = [json.loads(line)["metrics"] for line in file.read_text().splitlines()]
    names = sorted({name for step in steps for name in step if not _MEASURED.search(name)})
    check_numbers(name, {name: [step.get(name) for step in steps] for name in names})


def check_numbers(name: str, values: dict[str, Any]) -> None:
    """Compare results of arithmetic with those frozen under `name`."""
    here = _arithmetic()
    frozen = read_frozen(f"metrics/{name}")
    if IS_REWRITING or frozen[:1] == [here]:
        check_frozen(f"metrics/{name}", [here, *(f"{key} {json.dumps(value)}" for key, value in values.items())])
        return
    tolerance = _TOLERANCES.get(name, _TOLERANCE)
    warnings.warn(f"{name}: compared to {tolerance:g}, as it was frozen {frozen[0].lstrip('# ')}", stacklevel=2)
    before = {key: json.loads(value) for key, value in (line.split(" ", 1) for line in frozen[1:])}
    assert values == {key: _near(value, tolerance) for key, value in before.items()}


def _near(value: Any, tolerance: float) -> Any:
    """Return what numbers near those of a value equal; a step may lack one."""
    if isinstance(value, list):
        return [_near(item, tolerance) for item in value]
    return pytest.approx(value, rel=tolerance, abs=_TOLERANCE) if isinstance(value, int | float) else value


def _arithmetic() -> str:
    """Return what may decide the bits of a sum: the processor and the build of torch."""
    import torch

    cpu = dict(re.findall(r"^(vendor_id|cpu family|model)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M))
    return f"# with {platform.machine()} {' '.join(cpu.values())}, torch {torch.__version__}"
