"""Commands that use trained policies, and `rlinf import`, which converts job files of RLinf and verl."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer

from rlinf_cli import console, options
from rlinf_cli.command import Result, arg, command, opt
from rlinf_cli.interrupts import ExitCode, code_of
from rlinf_cli.job.job_file import is_override
from rlinf_cli.options import Checkpoint, FileOrRun, NoWait, Overrides, Share, choose_claims
from rlinf_core.errors import ConfigError, RLinfError

if TYPE_CHECKING:
    from rlinf_cli.importing.convert import Converted
    from rlinf_core.config.diagnostics import Diagnostics


Format = Literal["safetensors", "torchscript", "onnx"]


@command(
    "rlinf eval runs/embodied-20260314-101502 -n 200",
    "rlinf eval embodied/pick-laptop --checkpoint runs/embodied-20260314-101502",
    "rlinf eval runs/embodied-20260314-101502 --play -n 9 -o grasps.mp4",
    name="eval",
    needs={"--play": "--show"},
    excludes={"--play": "--allow-training-starts --video", "--no-wait": "--share"},
)
def evaluate(
    file: FileOrRun,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    episodes: Annotated[
        int | None,
        opt(
            "--episodes -n N",
            "Number of episodes, or of problems of a language model; by default as in `env.eval`, or all.",
            min=1,
        ),
    ] = None,
    out: Annotated[Path | None, opt("-o FILE|FOLDER", "New folder for `eval.json`; with --play, new mp4 file.")] = None,
    allow_training_starts: Annotated[
        bool, opt("--allow-training-starts", "Evaluate from training start states.")
    ] = False,
    video: Annotated[
        bool | None, opt("--video/--no-video", "Write videos, one per outcome. Default: if there are images.")
    ] = None,
    play: Annotated[
        bool, opt("--play", "Write only a video of episodes side by side, by default 4, at most 36.")
    ] = False,
    show: Annotated[
        bool | None,
        opt("--show/--no-show", "With --play: open it in the desktop's player. Default: if there is a display."),
    ] = None,
    no_wait: NoWait = False,
    share: Share = False,
) -> Result:
    """Evaluate a policy in episodes, or a language model on problems.

    RUN is a run folder or its name. For a FILE give the weights with --checkpoint; without it those that the file names
    are evaluated. KEY=VALUE replaces a value. The result is written with its settings to `eval.json`; equal weights
    give an equal one except for `times`.
    """
    from rlinf_cli.run.policies import evaluated, played

    choose_claims(no_wait=no_wait, share=share)
    if play:
        return played(file, overrides or [], checkpoint, episodes, out, show=show)
    return evaluated(
        file, overrides or [], checkpoint, episodes, out, training_starts=allow_training_starts, video=video
    )


@command(
    "rlinf export runs/embodied-20260314-101502",
    "rlinf export runs/embodied-20260314-101502 --format onnx -o exported",
    "rlinf export runs/math-20260314-101502 --checkpoint 100",
)
def export(
    run: Annotated[str, arg("RUN", options.runs)],
    kind: Annotated[Format, opt("--format -f", "Format of the policy.", case_sensitive=False)] = "safetensors",
    checkpoint: Checkpoint = None,
    out: Annotated[Path | None, opt("-o FOLDER", "New folder; by default in `exports` of the run.")] = None,
) -> Result:
    """Export a trained policy as a self-contained folder.

    RUN is a run folder or its name. safetensors is the format of `load_policy` and `actor.model.model_path`; a language
    model becomes a folder that transformers and vLLM load. torchscript and onnx, of policies that act, are a single
    graph from observations to actions. What is written is verified against the policy.
    """
    from rlinf_cli.run.policies import exported

    return exported(run, kind, checkpoint, out)


@command(
    "rlinf import examples/config/libero_grpo.yaml",
    "rlinf import ppo_trainer.yaml algorithm.adv_estimator=grpo trainer.nnodes=2",
    "rlinf import job.yaml -o grpo.yaml",
    "rlinf import examples/config -o configs",
    name="import",
)
def app(
    arguments: Annotated[list[str], arg("FILE|FOLDER|KEY=VALUE", options.yaml_paths)],
    out: Annotated[
        Path | None,
        opt(
            "-o FILE|FOLDER",
            "Output file, or folder for several; `-` for standard output. Default: NAME.rlinf.yaml beside it.",
        ),
    ] = None,
    search_path: Annotated[
        list[str] | None,
        opt("--search-path FOLDER", "Additional search folder for defaults lists. May be repeated."),
    ] = None,
    replace: Annotated[bool, opt("--replace", "Overwrite an existing output file.")] = False,
) -> Result:
    """Convert job files of RLinf and verl to rlinf files.

    Hydra's defaults lists, packages, overrides, search path and references are composed into one file. Comments are
    kept; a key without a counterpart becomes a comment with the reason. The summary lists every renamed or omitted key,
    and the result of `rlinf validate`. KEY=VALUE is a Hydra override. The job of a shell script of verl is written by
    `bash run.sh --cfg job > job.yaml`, where verl is installed.

    With a FOLDER, every job file in it and below is converted, and a table is printed.
    """
    overrides = [argument for argument in arguments if _is_override(argument)]
    names = [argument for argument in arguments if argument not in overrides]
    if len(names) != 1:
        raise typer.BadParameter("name one file or one folder")
    source = Path(names[0])
    _require_hydra()
    folders = [os.path.expanduser(folder) for folder in search_path or ()]
    convert = partial(_import, overrides=overrides, search_path=folders, replace=replace)
    return (_folder if source.is_dir() else _file)(source, out, convert)


def _is_override(argument: str) -> bool:
    """Return True for `key=value`, and for `group/below=name` if no such file exists."""
    return is_override(argument) or ("=" in argument and not os.path.exists(argument))


def _require_hydra() -> None:
    """Check that hydra-core is installed, which orders the files of defaults lists.

    Raises:
        RLinfError: it is not.
    """
    from rlinf_core.process.requirements import install_command, missing_modules

    if missing_modules(("hydra",)):
        raise RLinfError(
            "`rlinf import` needs the package hydra-core, which this Python does not have",
            help=f"run `{install_command('hydra')}`",
        )


class _Imported(NamedTuple):
    """The result for one file: converted and written, or the error."""

    source: Path
    target: Path | None = None
    converted: Converted | None = None
    findings: Diagnostics | None = None
    error: RLinfError | None = None

    @property
    def exit_code(self) -> ExitCode:
        if self.converted is None:
            return code_of(self.error) if self.error is not None else ExitCode.INVALID
        return ExitCode.FAILED if self.converted.errors else ExitCode.OK


_Convert: TypeAlias = Callable[[Path, Path | None, Collection[Path]], _Imported]


def _file(source: Path, out: Path | None, convert: _Convert) -> Result:
    from rlinf_cli.importing.convert import lines_of
    from rlinf_cli.importing.sources import IMPORTED

    target = out or source.with_name(source.stem + IMPORTED)
    target = target / (source.stem + ".yaml") if target is out and target.is_dir() else target
    imported = convert(source, None if str(out) == "-" else target, {source.resolve()})
    converted = imported.converted
    if converted is not None or not console.verbosity.json:
        _show_findings(imported)
    record = partial(_record, [imported])
    if converted is None:
        return Result(record=record, code=imported.exit_code)
    summary = "\n".join(lines_of(converted, str(imported.target) if imported.target else None))
    if imported.target is not None or console.verbosity.json:
        return Result(summary, record, imported.exit_code)
    return Result(converted.text.rstrip("\n"), record, imported.exit_code, (summary,))


def _folder(folder: Path, out: Path | None, convert: _Convert) -> Result:
    from rlinf_cli.importing.sources import IMPORTED, SCRIPT_ENDINGS, instead_of_script, job_files

    if out is not None and (str(out) == "-" or (out.exists() and not out.is_dir())):
        raise typer.BadParameter("for a folder, `-o` must be a folder")
    jobs, others = job_files(folder)
    if not jobs:
        scripts = sorted(path for ending in SCRIPT_ENDINGS for path in folder.rglob(f"*{ending}"))
        raise ConfigError(
            f"no job file in `{folder}`",
            why=f"YAML files below it: {len(others)}, none of them with `runner`, `trainer` or `actor_rollout_ref`"
            + (f"; shell scripts, which are not read: {len(scripts)}" if scripts else ""),
            help=instead_of_script(str(scripts[0])) if scripts else "name the folder with the main files of jobs",
        )
    imported: list[_Imported] = []
    kept = {source.resolve() for source in jobs}
    for source in jobs:
        inside = source.relative_to(folder)
        target = source.with_name(source.stem + IMPORTED) if out is None else out / inside.with_suffix(".yaml")
        imported.append(convert(source, target, kept))
        kept.add(target.resolve())
    code = max((result.exit_code for result in imported), key=lambda code: code is not ExitCode.OK)
    aside = others and not console.verbosity.json
    notes = (f"{len(others)} other YAML files are fragments of these, or not job files",) if aside else ()
    return Result(partial(_table, imported, folder), partial(_record, imported), code, notes)


def _import(
    source: Path,
    target: Path | None,
    kept: Collection[Path],
    *,
    overrides: Sequence[str],
    search_path: Sequence[str],
    replace: bool,
) -> _Imported:
    """Convert one file and write it; `kept` are files that `replace` does not overwrite."""
    from rlinf_cli.importing.convert import convert
    from rlinf_cli.importing.sources import read_job

    findings: Diagnostics | None = None
    try:
        file, findings = read_job(str(source), overrides, search_path, os.environ)
        if file is None:
            return _Imported(source, findings=findings)
        converted = convert(file, os.environ)
        if target is not None:
            if target.exists() and (not replace or target.resolve() in kept):
                instead = "" if target.resolve() in kept else ", or overwrite it with `--replace`"
                raise ConfigError(f"`{target}` already exists", help=f"name another file with `-o`{instead}")
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RLinfError(f"cannot create the folder `{target.parent}`", why=error.strerror) from error
            console.write_whole(target, converted.text)
    except RLinfError as error:
        return _Imported(source, findings=findings, error=error)
    return _Imported(source, target, converted, findings)


def _show_findings(imported: _Imported) -> None:
    """Print the findings from composing the file, and the error that kept it from being converted."""
    from rlinf_cli.job.findings import finding_blocks

    if imported.findings is not None and len(imported.findings):
        console.error("\n\n".join(finding_blocks([*imported.findings], sys.stderr)))
    if (error := imported.error) is not None:
        console.error_block(error.message, where=str(imported.source), why=error.why, do=error.help)


def _table(imported: list[_Imported], folder: Path) -> str:
    from rlinf_cli.importing.shared_rules import Fate

    rows: list[list[str]] = []
    for result in imported:
        name = str(result.source.relative_to(folder))
        if result.converted is None:
            first = next((finding.message for finding in result.findings or () if finding.severity == "error"), "")
            rows.append([name, "-", "-", "-", "-", "-", result.error.message if result.error else first])
        else:
            numbers = map(str, result.converted.counts.values())
            rows.append([name, result.converted.recipe, *numbers, result.converted.verdict])
    heads = ["FILE", "RECIPE", *(str(fate).upper() for fate in Fate), "RESULT"]
    return console.table(heads, rows, right=(2, 3, 4, 5))


def _record(imported: list[_Imported]) -> dict[str, Any]:
    from rlinf_cli.importing.convert import SCHEMA, record
    from rlinf_cli.job.findings import to_json

    files: list[dict[str, Any]] = []
    for result in imported:
        if result.converted is not None:
            files.append(record(result.converted, str(result.source), str(result.target) if result.target else None))
        else:
            error = result.error
            files.append(
                {
                    "file": str(result.source),
                    "written": None,
                    "error": None
                    if error is None
                    else {"message": error.message, "why": error.why, "help": error.help},
                    "findings": to_json([*(result.findings or ())]),
                }
            )
    return {"schema": SCHEMA, "ok": all(result.exit_code is ExitCode.OK for result in imported), "files": files}
