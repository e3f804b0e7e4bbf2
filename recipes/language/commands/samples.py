"""`rlinf samples`: sampled answers of a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Quiet, Run, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH


class Order(StrEnum):
    """The order of samples."""

    WRITTEN = "written"
    BEST = "best"
    WORST = "worst"
    RANDOM = "random"


def samples(
    run: Run = None,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="Training step; by default the last.", show_default=False),
    ] = None,
    order: Annotated[Order, typer.Option("--order", help="Sort order by reward.")] = Order.WRITTEN,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", min=1, help="Maximum number of samples.")] = 10,
    at_least: Annotated[
        float | None, typer.Option("--at-least", metavar="REWARD", help="Minimum reward.", show_default=False)
    ] = None,
    at_most: Annotated[
        float | None, typer.Option("--at-most", metavar="REWARD", help="Maximum reward.", show_default=False)
    ] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Colour tokens by their log-probability.", show_default=False)
    ] = False,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show sampled answers of a language model, with their rewards and the reasons for these.

    RUN is a run folder or its name in the folder of runs; by default the active run, else the last one.
    """
    from rlinf_cli.runs.answer_samples import read_samples
    from rlinf_cli.runs.run_lookup import find_run

    folder = find_run(run, log_path)
    found_step, every = read_samples(folder.path, step)
    chosen = [
        sample
        for sample in every
        if (at_least is None or sample["reward"] >= at_least) and (at_most is None or sample["reward"] <= at_most)
    ]
    if order is Order.RANDOM:
        import random

        random.shuffle(chosen)
    elif order is not Order.WRITTEN:
        chosen.sort(key=lambda sample: sample["reward"], reverse=order is Order.BEST)
    shown = chosen[:count]
    if output is Output.JSON:
        console.result_json(samples_record(folder.path, found_step, shown))
        return
    colour = logprobs and console.colored()
    console.result(samples_text(shown, colour=colour))
    if colour:
        console.message(legend())
    others = _other_steps(folder.path, found_step)
    console.message(f"step {found_step}: {len(shown)} of {len(chosen)} samples{others}")


def _other_steps(folder: Path, step: int) -> str:
    from rlinf_cli.runs.answer_samples import sampled_steps

    others = [other_step for other_step in sampled_steps(folder) if other_step != step]
    return f"; --step {others[-1]} or another of {len(others)} for earlier ones" if others else ""


app = command(samples, examples=("rlinf samples", "rlinf samples runs/math-20260314-101502 -n 3"), heading="Look back")


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
