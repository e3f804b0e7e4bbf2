"""`rlinf export`: export of a trained policy."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH


class Format(StrEnum):
    """Formats of exports."""

    SAFETENSORS = "safetensors"
    TORCHSCRIPT = "torchscript"
    ONNX = "onnx"


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", hidden=True, autocompletion=completion.runs)],
    kind: Annotated[
        Format, typer.Option("--format", "-f", help="Format of the policy.", case_sensitive=False)
    ] = Format.SAFETENSORS,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="N|PATH", help="Checkpoint, or its step; by default the newest.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="New folder; by default in `exports` of the run.", show_default=False
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Export a trained policy as a self-contained folder.

    RUN is a run folder or its name. safetensors is the format of `load_policy` and `actor.model.model_path`; a language
    model becomes a folder that transformers and vLLM load. torchscript and onnx, of policies that act, are a single
    graph from observations to actions. What is written is verified against the policy.
    """
    from rlinf_cli.run.policy_source import checkpoint_of, find_run_folder
    from rlinf_core.errors import RLinfError, RunError
    from rlinf_core.job.load import load_job
    from rlinf_core.runners.opened_run import note_step
    from rlinf_core.runners.storage.checkpoint import load_manifest

    run_folder = find_run_folder(run, log_path)
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
    folder = out or run_folder.path / "exports" / f"{weights.name}-{kind.value}"
    step = load_manifest(weights).step
    record = {**function(job.config, weights, folder, kind.value), "step": step}
    note_step(folder, step)
    if output is Output.JSON:
        console.result_json({"schema": "rlinf.export/1", **record})
        return
    console.result(_text(record))


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


app = command(
    export,
    examples=(
        "rlinf export runs/embodied-20260314-101502",
        "rlinf export runs/embodied-20260314-101502 --format onnx --out exported",
        "rlinf export runs/math-20260314-101502 --checkpoint 100",
    ),
    no_args_is_help=True,
)
