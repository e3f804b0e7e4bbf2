"""Job files of other projects: reading one with its overrides, and finding all in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rlinf_cli.importing.hydra_files import HydraFile, compose_hydra
from rlinf_cli.importing.hydra_source import DEFAULTS, named_files
from rlinf_cli.importing.projects import JOB_SECTIONS
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import load_source, read
from rlinf_core.errors import ConfigError

ENDINGS: Final = (".yaml", ".yml")
SCRIPT_ENDINGS: Final = (".sh", ".bash")
# The suffix of a converted file beside its original.
IMPORTED: Final = ".rlinf.yaml"
MAX_FILES: Final = 2000


class ReadJob(NamedTuple):
    """A composed file, or None, with its findings."""

    file: HydraFile | None
    diagnostics: Diagnostics


def read_job(name: str, overrides: Sequence[str], search_path: Sequence[str], environ: Mapping[str, str]) -> ReadJob:
    """Read and compose a job file; errors are returned as findings.

    Args:
        name: the file.
        overrides: arguments of Hydra: `group=name` where a folder of that name is searched, `key=value`, `+key=value`,
            `~key`.
        search_path: further folders of groups.
        environ: the environment.

    Raises:
        ConfigError: it is a shell script.
    """
    diagnostics = Diagnostics()
    if is_script(Path(name)):
        raise ConfigError("this is a shell script, which `rlinf import` does not read", help=instead_of_script(name))
    source = load_source(name, diagnostics)
    if source is None:
        return ReadJob(None, diagnostics)
    file = compose_hydra(source, diagnostics, environ=environ, search_path=search_path, overrides=overrides)
    return ReadJob(file if diagnostics.ok else None, diagnostics)


def is_script(file: Path) -> bool:
    """Return whether a file is a shell script: by its ending, or its first line."""
    if file.suffix in SCRIPT_ENDINGS:
        return True
    if not file.is_file():
        return False
    with file.open("rb") as start:
        return start.read(2) == b"#!"


def instead_of_script(name: str) -> str:
    """Return how the job of a script of verl becomes a file."""
    return (
        f"where verl is installed, `bash {name} --cfg job > job.yaml` writes the job that it starts; then `rlinf import"
        " job.yaml`"
    )


def job_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the job files below a folder, and the other YAML files."""
    files = sorted(
        Path(where) / name
        for where, _, names in os.walk(folder)
        for name in names
        if name.endswith(ENDINGS) and not name.endswith(IMPORTED)
    )[:MAX_FILES]
    jobs: list[Path] = []
    others: list[Path] = []
    named: set[str] = set()
    for file in files:
        quiet = Diagnostics()
        source = load_source(str(file), quiet)
        tree = read(source, quiet) if source is not None else None
        if tree is None:
            # An unreadable file is reported, not skipped.
            jobs.append(file)
            continue
        # A base is named without a group, and is itself a job.
        named |= {os.path.realpath(file.parent / f"{name}.yaml") for name, _ in named_files(tree) if "/" in name}
        sections = set(tree.keys())
        is_job = bool(sections & set(JOB_SECTIONS)) or (DEFAULTS in sections and file.parent == folder)
        (jobs if is_job else others).append(file)
    named_by_others = [file for file in jobs if os.path.realpath(file) in named]
    return [file for file in jobs if file not in named_by_others], sorted([*others, *named_by_others])
