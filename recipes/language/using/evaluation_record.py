"""`eval.json` of a language model."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_core import Job
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import open_checkpoint, versions


def write_evaluation(
    schema: str,
    job: Job,
    checkpoint: Path | None,
    model_path: str | None,
    folder: Path,
    began: float,
    parts: Mapping[str, Any],
) -> dict[str, Any]:
    """Write `eval.json` into `folder`, and return its object.

    Args:
        schema: the name of the contract.
        job: the checked file.
        checkpoint: the checkpoint that was evaluated; None: the folder `model_path`.
        began: seconds since 1970.
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
        "times": {"began": began, "seconds": time.time() - began},
    }
    durable.write_whole(folder / "eval.json", json.dumps(record, indent=1) + "\n")
    return record
