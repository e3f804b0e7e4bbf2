"""The diagnostic codes: the meaning of each rule, with a wrong and a right example.

Each code is a data file, in the folder of its loading stage. `rlinf explain`, the documentation and the tests read the
files; reporting a finding does not. The wrong example is also the rule's test: the finding must be at its markers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from rlinf_core.config.diagnostics import Severity

# The loading stages, in order; each has a folder of codes.
STAGES: Final = ("reading", "composing", "shape", "cluster", "placement", "recipe", "job")
_FOLDER: Final = Path(__file__).parent
OPEN, CLOSE = "«", "»"


@dataclass(frozen=True, slots=True)
class Example:
    """A configuration, shown by `rlinf explain` and loaded by the tests.

    In a wrong example, `«` and `»` enclose the span to underline, in `text`, in an override or in one of `files`.
    Without markers the finding is at the start of the file.

    Attributes:
        text: the file.
        overrides: arguments of the command line.
        files: other files beside it, name and text.
        environ: the environment for `${env:...}`.
        assume: `--assume` arguments.
        found: the number of accelerators that `--live` finds on every node; None without `--live`.
        data: the bytes of a file that is not text; `text` then describes it.
        name: the file name to load if the name is the mistake, in which case no file is written.
    """

    text: str
    overrides: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    assume: tuple[str, ...] = ()
    found: int | None = None
    data: bytes | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """A rule.

    Attributes:
        name: its name in kebab case, as shown in brackets.
        severity: its severity in reports.
        title: its title, one line without a full stop.
        meaning: one or two short paragraphs on why it matters and what to do.
        wrong: an example that triggers it.
        right: the corrected example.
    """

    name: str
    severity: Severity
    title: str
    meaning: str
    wrong: Example
    right: Example


def code_names() -> list[str]:
    """Return the names of all codes, stage by stage, without loading them."""
    return [name for names in _names_by_stage().values() for name in names]


def find_code(name: str) -> Code | None:
    """Return the code called `name`, or None."""
    stage = next((stage for stage, names in _names_by_stage().items() if name in names), None)
    return None if stage is None else _read(stage, name)


@cache
def codes_by_stage() -> dict[str, tuple[Code, ...]]:
    """Return the codes of every stage of loading, in the order of the stages."""
    return {stage: tuple(_read(stage, name) for name in names) for stage, names in _names_by_stage().items()}


def all_codes() -> dict[str, Code]:
    """Return every code by its name, stage by stage."""
    return {code.name: code for codes in codes_by_stage().values() for code in codes}


@cache
def _names_by_stage() -> dict[str, tuple[str, ...]]:
    return {stage: tuple(sorted(path.stem for path in (_FOLDER / stage).glob("*.yaml"))) for stage in STAGES}


def _read(stage: str, name: str) -> Code:
    from ruamel.yaml import YAML

    entry: Mapping[str, Any] = YAML(typ="safe", pure=True).load(_FOLDER / stage / f"{name}.yaml")  # pyright: ignore[reportUnknownMemberType]
    examples = {key: _example(entry[key]) for key in ("wrong", "right")}
    return Code(name, Severity(entry["severity"]), entry["title"], entry["meaning"], **examples)


def _example(written: str | Mapping[str, Any]) -> Example:
    if isinstance(written, str):
        return Example(written)
    data: Mapping[str, Any] | None = written.get("data")
    return Example(
        text=written["text"],
        overrides=tuple(written.get("overrides", ())),
        files=tuple(written.get("files", {}).items()),
        environ=tuple(written.get("environ", {}).items()),
        assume=tuple(written.get("assume", ())),
        found=written.get("found"),
        data=None if data is None else (data["text"] * data["times"]).encode("latin-1"),
        name=written.get("name", ""),
    )
