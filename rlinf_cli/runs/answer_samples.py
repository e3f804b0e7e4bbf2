"""Sampled answers of a run: `samples/step_N.jsonl` in its folder, as recipes of language models write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, Field, ValidationError

from rlinf_core.errors import RunError
from rlinf_core.foreign.file_models import FileModel, Rank, first_fault
from rlinf_core.foreign.files import read_text

FOLDER: Final = "samples"
_FILE = re.compile(r"step_(\d+)\.jsonl")


class _Turn(FileModel):
    """A turn of a conversation, as a line of `samples/step_N.jsonl` has it."""

    model_config = ConfigDict(extra="allow")

    text: str
    who: str = ""
    segment: Rank = 0
    tool: str | None = None
    seconds: float | None = None
    failure: str | None = None


class _Sample(FileModel):
    """A line of `samples/step_N.jsonl`: an answer, as `SampleRecord` is written."""

    model_config = ConfigDict(extra="allow")

    reward: float
    slot: int = 0
    sample: int = 0
    prompt: str = ""
    text: str = ""
    answer: str = ""
    reason: str = ""
    finish_reason: str = ""
    parts: dict[str, float] = Field(default_factory=dict[str, float])
    pieces: list[str] = Field(default_factory=list[str])
    logprobs: list[float] = Field(default_factory=list[float])
    turns: list[_Turn] = Field(default_factory=list[_Turn])


def sampled_steps(run_folder: Path) -> list[int]:
    """Return the steps that have samples, ascending."""
    names = (_FILE.fullmatch(file.name) for file in (run_folder / FOLDER).glob("step_*.jsonl"))
    return sorted(int(match.group(1)) for match in names if match)


def read_samples(run_folder: Path, step: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """Return a step and its samples; by default the last step with samples.

    Raises:
        RunError: there are none, or the file cannot be read.
    """
    steps = sampled_steps(run_folder)
    if not steps:
        raise RunError(
            "the run has no samples",
            where=str(run_folder),
            help="recipes of language models write them every `runner.sample_interval` steps",
        )
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        listed = ", ".join(map(str, steps[:12])) + (", ..." if len(steps) > 12 else "")
        raise RunError(f"step {wanted} has no samples", where=str(run_folder), help=f"steps with samples: {listed}")
    file = run_folder / FOLDER / f"step_{wanted}.jsonl"
    try:
        lines = read_text(file).split("\n")
    except OSError as error:
        raise RunError("the samples cannot be read", where=str(file), why=error.strerror) from None
    return wanted, [_read(line, number, file) for number, line in enumerate(lines, start=1) if line]


def _read(line: str, number: int, file: Path) -> dict[str, Any]:
    try:
        sample = _Sample.model_validate_json(line)
    except ValidationError as error:
        raise RunError("the samples cannot be read", where=f"{file}:{number}", why=first_fault(error)) from None
    left_out = {"parts", "turns", *(() if sample.pieces else ("pieces", "logprobs"))} - sample.model_fields_set
    return sample.model_dump(exclude=left_out)
