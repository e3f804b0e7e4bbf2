"""Samples of what a language model answers, kept for people to read: `samples/step_N.jsonl` in the run folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from rlinf_core import RunError
from rlinf_core.config.secrets import environment_secrets
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.process.known_secrets import hidden, remember

FOLDER: Final = "samples"
_TEXTS: Final = frozenset({"prompt", "text", "answer", "reason"})
_TOKENS: Final = frozenset({"tokens", "pieces", "logprobs", "versions"})
_FILE = re.compile(r"step_(\d+)\.jsonl")


def write_samples(run_folder: Path, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write the samples of a step, aside and renamed; secret values are masked.

    Args:
        run_folder: of the run.
        step: they are of.
        samples: with `prompt`, `text`, `answer` and `reason`; their `tokens`, `pieces`, `logprobs` and `versions`; and
            `turns`, each with `text`.

    Raises:
        RunError: the folder cannot be written.
    """
    remember(environment_secrets())
    folder = run_folder / FOLDER
    aside = folder / f".step_{step}.{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        with aside.open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(_masked(each), ensure_ascii=False) + "\n" for each in samples)
        aside.rename(folder / f"step_{step}.jsonl")
    except OSError as error:
        raise RunError("samples cannot be written", where=str(folder), why=error.strerror or str(error)) from None


def _masked(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample without secrets; the tokens of a text that held one are left out, for they spell it."""
    found: dict[str, Any] = {name: hidden(value) if name in _TEXTS else value for name, value in sample.items()}
    if "turns" in found:
        found["turns"] = [{**turn, "text": hidden(turn["text"])} for turn in found["turns"]]
    said = [(each.get("text"), [turn["text"] for turn in each.get("turns", ())]) for each in (found, sample)]
    if said[0] != said[1]:
        found |= dict.fromkeys(_TOKENS & found.keys(), ())
    return found


def sampled_steps(run_folder: Path) -> list[int]:
    """Return the steps that have samples, ascending."""
    names = (_FILE.fullmatch(file.name) for file in (run_folder / FOLDER).glob("step_*.jsonl"))
    return sorted(int(match.group(1)) for match in names if match)


def read_samples(run_folder: Path, step: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """Return a step and its samples; of the last step that has some where none is named.

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
        return wanted, [
            load_json_object(line, non_finite=True) for line in file.read_text(encoding="utf-8").splitlines() if line
        ]
    except (OSError, ValueError) as error:
        raise RunError("the samples cannot be read", where=str(file), why=str(error)) from None
