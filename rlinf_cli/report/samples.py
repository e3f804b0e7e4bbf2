"""Sampled answers of a run (`samples/step_N.jsonl` in its folder), and their text for `rlinf report --samples`."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, Field, ValidationError

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.runs.run_lookup import find_run
from rlinf_core.config.diagnostics import visible
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import FileModel, Rank, first_fault, read_text

FOLDER: Final = "samples"
_FILE = re.compile(r"step_(\d+)\.jsonl")


class _Turn(FileModel):
    """A turn of a conversation in a line of `samples/step_N.jsonl`."""

    model_config = ConfigDict(extra="allow")

    text: str
    who: str = ""
    segment: Rank = 0
    tool: str | None = None
    seconds: float | None = None
    failure: str | None = None


class _Sample(FileModel):
    """A line of `samples/step_N.jsonl`: an answer in the format of `AnswerGroup.lines`."""

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
        RunError: there are no samples, or the file cannot be read.
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


# Log-probability thresholds: plain above the first, yellow between, red below the second.
_LIKELY, _UNLIKELY = -0.7, -3.0


def samples_result(
    run: str | None,
    step: int | None,
    order: str,
    count: int,
    rewards: tuple[float | None, float | None],
    *,
    logprobs: bool,
) -> Result:
    """Return the samples of a step, with their rewards and the reasons for the rewards.

    Args:
        run: the run's folder or name; None for the active one, else the last.
        step: the training step; None for the last.
        order: `written`, `best`, `worst` or `random`.
        count: the maximum number of samples.
        rewards: the least and the greatest reward.
        logprobs: whether to color tokens by their log-probability.
    """
    folder = find_run(run)
    step, every = read_samples(folder.path, step)
    least, most = (
        end if reward is None else reward for reward, end in zip(rewards, (-math.inf, math.inf), strict=True)
    )
    chosen = [sample for sample in every if not (sample["reward"] < least or sample["reward"] > most)]
    if order == "random":
        random.shuffle(chosen)
    elif order != "written":
        chosen.sort(key=lambda sample: sample["reward"], reverse=order == "best")
    shown = chosen[:count]
    colour = logprobs and console.colored()
    others = [other for other in sampled_steps(folder.path) if other != step]
    hint = f"; --step {others[-1]} or another of {len(others)} for earlier ones" if others else ""
    legend = f"log-probabilities of tokens: yellow below {_LIKELY:g}, red below {_UNLIKELY:g}"
    notes = (*([legend] if colour else []), f"step {step}: {len(shown)} of {len(chosen)} samples{hint}")
    record = {"schema": "rlinf.samples/1", "run": str(folder.path), "step": step, "samples": shown}
    return Result(lambda: "\n\n".join(_block(sample, colour) for sample in shown), record, notes=notes)


def _block(sample: Mapping[str, Any], colour: bool) -> str:
    parts = "".join(f", {name} {value:g}" for name, value in sample.get("parts", {}).items())
    ended = {"length": ", cut off at the length limit", "aborted": ", aborted"}.get(sample["finish_reason"], "")
    head = (
        f"prompt {sample['slot']}, answer {sample['sample']}: reward {sample['reward']:g} ({sample['reason']}{ended})"
    )
    pieces = sample.get("pieces") or ()
    text = _coloured(pieces, sample["logprobs"]) if colour and pieces else _safe(sample["text"])
    lines = [console.style(head + parts, "bold")]
    turns = sample.get("turns") or ()
    if turns:
        branched = any(turn["segment"] for turn in turns)
        lines += [line for turn in turns for line in _turn(turn, branched=branched)]
    else:
        lines += _indented("asked", _safe(sample["prompt"]))
    # An agent may end without an answer, and its task, such as a game, may have no right answer.
    lines += _indented("answered", text) if text or not turns else []
    lines += _indented("right is", _safe(sample["answer"])) if sample["answer"] or not turns else []
    return "\n".join(lines)


def _turn(turn: Mapping[str, Any], *, branched: bool) -> list[str]:
    """Return the lines of a conversation turn with its time; for a tool also its name and error.

    Args:
        turn: the turn from a sample.
        branched: whether to number the conversations, because the agent's run had several.
    """
    text, details = _safe(turn["text"]).rstrip("\n"), list[str]()
    if branched and turn["who"] != "tool":
        details.append(f"conversation {turn['segment'] + 1}")
    if turn["tool"]:
        details.append(turn["tool"])
    if turn["seconds"]:
        details.append(f"{1000 * turn['seconds']:.1f} ms")
    if turn["failure"]:
        details.append(turn["failure"])
    return _indented(turn["who"], f"{text}  ({', '.join(details)})" if details else text)


def _indented(label: str, text: str) -> list[str]:
    # An answer may end with its stop sequence, a newline.
    first, *rest = text.rstrip("\n").split("\n")
    return [f"  {label:>8}  {first}", *(f"            {line}" for line in rest)]


def _coloured(pieces: Sequence[str], logprobs: Sequence[float]) -> str:
    details: list[str] = []
    for piece, logprob in zip(pieces, logprobs, strict=False):
        plain = _safe(piece)
        colour = None if logprob > _LIKELY else "yellow" if logprob > _UNLIKELY else "red"
        details.append(plain if colour is None else console.style(plain, colour))
    return "".join(details)


def _safe(text: str) -> str:
    """Return a text that is safe for terminals: control characters except newlines are escaped."""
    return "\n".join(visible(line) for line in text.split("\n"))
