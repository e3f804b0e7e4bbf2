"""The files and the answer of `rlinf export`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_cli.command import Result
from rlinf_cli.run.policy_source import checkpoint_of, find_run_folder
from rlinf_core.errors import RLinfError, RunError
from rlinf_core.job.load import load_job
from rlinf_core.runners.opened_run import note_step
from rlinf_core.runners.storage.checkpoint import load_manifest


def exported(run: str, kind: str, checkpoint: str | None, out: Path | None) -> Result:
    """Write a policy in a format, and return what was written.

    Raises:
        RLinfError: there is no such run or checkpoint, or the recipe has no export.
    """
    run_folder = find_run_folder(run)
    if run_folder is None:
        raise RunError("this is not a run folder", where=run, help="`rlinf runs` lists them")
    job = load_job(str(run_folder.config_file))
    function = job.recipe.load(job.recipe.export) if job.recipe is not None else None
    if job.recipe is not None and function is None:
        raise RLinfError(f"recipe `{job.recipe.name}` has no export")
    if function is None or job.config is None:
        job.raise_if_bad()
        raise RLinfError("the configuration of the run cannot be read", where=str(run_folder.config_file))
    weights = checkpoint_of(checkpoint, run_folder)
    assert weights is not None
    folder = out or run_folder.path / "exports" / f"{weights.name}-{kind}"
    step = load_manifest(weights).step
    record = {**function(job.config, weights, folder, kind), "step": step}
    note_step(folder, step)
    return Result(partial(_text, record), {"schema": "rlinf.export/1", **record})


def _text(record: Mapping[str, Any]) -> str:
    lines = [f"{record['folder']}: {', '.join(record['files'])}", f"  step    {record['step']}"]
    for side in ("inputs", "outputs"):
        for name, tensor in record[side].items():
            shape = ", ".join(map(str, tensor["shape"]))
            lines.append(f"  {side[:-1]:6}  {name}  {tensor['dtype']} [{shape}]")
    if record["difference"] is None:
        lines.append("  not verified: onnxruntime is not installed")
    else:
        lines.append(f"  matches the policy within {record['difference']:.1g}")
    return "\n".join(lines)
