"""`eval.json` of a language model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_core import Job
from rlinf_core.runners.step_clock import Stopwatch
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import open_checkpoint, versions


def write_evaluation(
    schema: str,
    job: Job,
    checkpoint: Path | None,
    model_path: str | None,
    folder: Path,
    watch: Stopwatch,
    parts: Mapping[str, Any],
) -> dict[str, Any]:
    """Write `eval.json` into `folder`, and return its object.

    Args:
        schema: the name of the contract.
        job: the checked file.
        checkpoint: the checkpoint that was evaluated; None: the folder `model_path`.
        watch: started at the begin of the evaluation.
        parts: what was evaluated on, and the figures.
    """
    record = {
        "schema": schema,
        "recipe": job.recipe.name if job.recipe is not None else None,
        "checkpoint": {
            "step": None if checkpoint is None else open_checkpoint(checkpoint).step,
            "model_path": None if checkpoint is not None else model_path,
        },
        **parts,
        "versions": versions(),
        "times": watch.times(),
    }
    durable.write_whole(folder / "eval.json", json.dumps(record, indent=1) + "\n")
    return record
