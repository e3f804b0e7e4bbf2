"""Three steps of shipped jobs that run on any machine in seconds: their metrics by seed, and the folder they leave.

The order in which a kernel adds depends on the processor. The jobs use kernels that every processor has: with these,
switching off what numpy, oneDNN and the C library choose by processor left every metric the same bits, while one
differing bit in a logit makes a language model draw another token. Metrics are compared bitwise where the processor
and the build of torch are those that they were frozen with, elsewhere to `_TOLERANCE` and with a warning.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.golden.command_line import REPOSITORY
from tests.golden.frozen import IS_REWRITING, check_frozen, read_frozen

# One for each way to learn.
JOBS: Final = ("cartpole", "math_laptop", "sft_chat_laptop")
# Kernels that every processor of the architecture has, so that sums are the same bits on all of them.
_ARITHMETIC: Final = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
# What the clock and the machine make.
_MEASURED: Final = re.compile(r"^(time|speed|memory)/|_per_second$")
_TOLERANCE: Final = 1e-3
# Objects whose keys are data, and folders whose files are of the format of transformers.
_FREE: Final = frozenset({"config", "digests", "env", "env_layers", "facts", "files", "metrics", "phases", "versions"})
_MODEL_FOLDERS: Final = frozenset({"huggingface", "model"})
_RUN_ID: Final = re.compile(r"-\d{8}-\d{6}(-\w+)?")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", JOBS)
def test_three_steps_end_as_before(job: str, tmp_path: Path) -> None:
    run = _train(job, tmp_path)
    check_frozen(f"folders/{job}", _folder(run))
    _check_metrics(job, [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()])


def _train(job: str, folder: Path) -> Path:
    """Run three steps, and return the run's folder."""
    words = ["train", job, "runner.max_steps=3", "runner.val_check_interval=-1", f"runner.logger.log_path={folder}"]
    environ = {name: os.environ[name] for name in ("PATH", "HOME")} | _ARITHMETIC
    environ |= {"PYTHONPATH": str(REPOSITORY), "RLINF_REPORT": "0"}
    command = [sys.executable, "-m", "rlinf_cli", *words]
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    (run,) = (path.parent for path in folder.glob("*/run.json"))
    return run


def _check_metrics(job: str, steps: list[dict[str, Any]]) -> None:
    names = sorted({name for step in steps for name in step if not _MEASURED.search(name)})
    here = _arithmetic()
    values = {name: [step.get(name) for step in steps] for name in names}
    frozen = read_frozen(f"metrics/{job}")
    if IS_REWRITING or frozen[:1] == [here]:
        check_frozen(f"metrics/{job}", [here, *(f"{name} {json.dumps(row)}" for name, row in values.items())])
        return
    warnings.warn(f"{job}: metrics are compared to {_TOLERANCE:g}, as they were frozen {frozen[0]}", stacklevel=2)
    before = {name: json.loads(row) for name, row in (line.split(" ", 1) for line in frozen[1:])}
    assert values == {name: pytest.approx(row, rel=_TOLERANCE, abs=_TOLERANCE) for name, row in before.items()}


def _arithmetic() -> str:
    """Return what may decide the bits of a sum: the processor and the build of torch."""
    import torch

    cpu = dict(re.findall(r"^(vendor_id|cpu family|model)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M))
    return f"# with {platform.machine()} {' '.join(cpu.values())}, torch {torch.__version__}"


def _folder(run: Path) -> Iterator[str]:
    """Yield every file of the run: of JSON the keys with the kinds of their values, of weights the shapes."""
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = _RUN_ID.sub("-ID", str(path.relative_to(run)))
        yield name
        yield from (f"{name}: {fact}" for fact in _facts(path))


def _facts(path: Path) -> list[str]:
    if path.suffix in (".json", ".jsonl") and path.parent.name not in _MODEL_FOLDERS:
        texts = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        return sorted({kind for text in texts for kind in _kinds(json.loads(text))})
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        return [f"{name} {part.get_dtype()} {part.get_shape()}" for name, part in sorted(slices.items())]
    return []


def _kinds(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path and the kind of every value."""
    if isinstance(value, dict) and value and path.rpartition(".")[2] in _FREE:
        for item in value.values():
            yield f"{path}.* {_kind(item)}"
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _kinds(item, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for item in value:
            yield from _kinds(item, f"{path}[]")
    else:
        yield f"{path} {_kind(value)}"


def _kind(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
