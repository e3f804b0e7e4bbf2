"""`rlinf` as a person runs it: a process of its own, in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
# What an interpreter finds that has no rlinf of its own, and a Ray that nobody else uses.
OURS = {"PYTHONPATH": str(REPOSITORY), "RLINF_ADDRESS": "local"}


def rlinf(
    folder: Path,
    *words: str,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    timeout: float = 3500,
) -> str:
    """Return what `rlinf WORDS` prints in a folder; fail with its last words where it does not succeed.

    Without `env` it has this process's variables, and a Ray of its own.
    """
    command, environ = [python, "-m", "rlinf_cli", *words], env or os.environ | {"RLINF_ADDRESS": "local"}
    done = subprocess.run(
        command, cwd=folder, env=dict(environ), capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def last_metrics(folder: Path) -> dict[str, Any]:
    """Return the last line of the metrics of the only run in a folder."""
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    return json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])
