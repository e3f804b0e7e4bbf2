"""`rlinf samples`: sampled answers of a language model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

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
    from recipes.language.commands.sample_text import legend, samples_record, samples_text
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
