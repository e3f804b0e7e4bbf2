"""Sampled answers of a language model as text: `rlinf report --samples`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.runs.answer_samples import read_samples, sampled_steps
from rlinf_cli.runs.run_lookup import find_run
from rlinf_core.config.render import visible

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
    """Return the samples of a step, with their rewards and the reasons for these.

    Args:
        run: the run's folder or name; None for the active one, else the last.
        step: the training step; None for the last.
        order: `written`, `best`, `worst` or `random`.
        count: the maximum number.
        rewards: the least and the greatest reward.
        logprobs: whether tokens are coloured by their log-probability.
    """
    folder = find_run(run)
    step, every = read_samples(folder.path, step)
    least, most = rewards
    chosen = [
        sample
        for sample in every
        if (least is None or sample["reward"] >= least) and (most is None or sample["reward"] <= most)
    ]
    if order == "random":
        random.shuffle(chosen)
    elif order != "written":
        chosen.sort(key=lambda sample: sample["reward"], reverse=order == "best")
    shown = chosen[:count]
    colour = logprobs and console.colored()
    others = _other_steps(folder.path, step)
    notes = (*([legend()] if colour else []), f"step {step}: {len(shown)} of {len(chosen)} samples{others}")
    return Result(
        partial(samples_text, shown, colour=colour), partial(samples_record, folder.path, step, shown), notes=notes
    )


def _other_steps(folder: Path, step: int) -> str:
    others = [other_step for other_step in sampled_steps(folder) if other_step != step]
    return f"; --step {others[-1]} or another of {len(others)} for earlier ones" if others else ""


def samples_text(samples: Sequence[Mapping[str, Any]], *, colour: bool = False) -> str:
    """Return a block for each sample: reward and reason, prompt, answer."""
    return "\n\n".join(_block(sample, colour) for sample in samples)


def legend() -> str:
    """Return the legend of the token colours."""
    return f"log-probabilities of tokens: yellow below {_LIKELY:g}, red below {_UNLIKELY:g}"


def samples_record(folder: Path, step: int, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the samples as `rlinf report --samples --json` prints them."""
    return {
        "schema": "rlinf.samples/1",
        "run": str(folder),
        "step": step,
        "samples": [dict(sample) for sample in samples],
    }


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
    # An agent may end without an answer, and its task may have no right one: a game has neither.
    lines += _indented("answered", text) if text or not turns else []
    lines += _indented("right is", _safe(sample["answer"])) if sample["answer"] or not turns else []
    return "\n".join(lines)


def _turn(turn: Mapping[str, Any], *, branched: bool) -> list[str]:
    """Return the lines of a conversation turn with its time; for a tool also its name and error.

    Args:
        turn: the turn, as a sample has it.
        branched: whether the run had several conversations, which are then numbered.
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
