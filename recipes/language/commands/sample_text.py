"""Sampled answers of a language model as text and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf_cli.console import console

# Log-probability thresholds: plain above the first, yellow between, red below the second.
_LIKELY, _UNLIKELY = -0.7, -3.0


def samples_text(samples: Sequence[Mapping[str, Any]], *, colour: bool = False) -> str:
    """Return a block for each sample: reward and reason, prompt, answer."""
    return "\n\n".join(_block(sample, colour) for sample in samples)


def legend() -> str:
    """Return the legend of the token colours."""
    return f"log-probabilities of tokens: yellow below {_LIKELY:g}, red below {_UNLIKELY:g}"


def samples_record(folder: Path, step: int, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the samples as `rlinf samples --output json` prints them."""
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
    from rlinf_core.config.render import visible

    return "\n".join(visible(line) for line in text.split("\n"))
