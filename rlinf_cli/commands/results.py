"""Commands for the results of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlinf_cli.arguments import options
from rlinf_cli.arguments.options import Run, Runs
from rlinf_cli.command import Result, arg, command, opt
from rlinf_cli.runs.x_axis import XAxis

Order = Literal["written", "best", "worst", "random"]


@command(
    "rlinf why",
    "rlinf why --bundle failure.tar.gz",
    "rlinf why --replay episode-1834123-17",
    excludes={"--replay": "--bundle"},
)
def why(
    run: Run = None,
    replay: Annotated[
        str | None,
        opt("--replay ITEM", "Do a quarantined item again, alone: a file of `quarantine/`, as `episode-1834123-17`."),
    ] = None,
    bundle: Annotated[
        Path | None,
        opt(
            "--bundle FILE",
            "Also write the run's evidence, events, metrics and configuration into FILE, a tar.gz for a bug report,"
            " with secret values masked.",
        ),
    ] = None,
) -> Result:
    """Explain why a run failed, or does not learn, and what to do.

    What failed first, what followed, the evidence. RUN is a run folder or its name in the folder of runs; by default
    the active run, else the last one. Reads that folder; if an active run finishes no steps, also what its processes
    do. The exit code is 0 where nothing is wrong, and 1 where a cause was named, or where a replayed item kills the
    process again.
    """
    if replay is not None:
        from rlinf_cli.run.policies import replayed

        return replayed(run, replay)
    from rlinf_cli.why.diagnosis import explained

    return explained(run, bundle)


@command(
    "rlinf report",
    "rlinf report --watch",
    "rlinf report runs/sweep-20260314-101502 -o sweep.html",
    needs={"--samples": "--step --order --count --at-least --at-most --logprobs"},
    excludes={"--samples": "--text --watch -o", "--text": "--watch -o"},
)
def report(
    runs: Runs = None,
    out: Annotated[
        Path | None, opt("-o FILE", "Output file; by default report.html in the run folder, or here for several runs.")
    ] = None,
    watch: Annotated[bool, opt("--watch", "Write it again every few seconds, until the run ends or Ctrl-C.")] = False,
    text: Annotated[bool, opt("--text", "Print the summary of the run instead.")] = False,
    samples: Annotated[bool, opt("--samples", "Print sampled answers of a language model instead.")] = False,
    step: Annotated[int | None, opt("--step N", "With --samples: training step; by default the last.", min=0)] = None,
    order: Annotated[Order, opt("--order", "With --samples: sort order by reward.")] = "written",
    count: Annotated[int, opt("--count -n N", "With --samples: maximum number.", min=1)] = 10,
    at_least: Annotated[float | None, opt("--at-least REWARD", "With --samples: minimum reward.")] = None,
    at_most: Annotated[float | None, opt("--at-most REWARD", "With --samples: maximum reward.")] = None,
    logprobs: Annotated[bool, opt("--logprobs", "With --samples: colour tokens by their log-probability.")] = False,
) -> Result | None:
    """Write an HTML report of a run: curves, failures, samples, times.

    RUN is a run folder or its name in the folder of runs; by default the active run, else the last one. The page is one
    self-contained file. `rlinf train` writes it at the end of a run. Several RUNs, or the folder of a sweep, are shown
    side by side.

    With --watch a browser that shows the page loads it again by itself. Only folders of runs are read.
    """
    if samples:
        from rlinf_cli.report.samples import samples_result

        name = _one(runs, "--samples")
        return samples_result(name, step, order, count, (at_least, at_most), logprobs=logprobs)
    if text:
        from rlinf_cli.why.diagnosis import summary

        return summary(_one(runs, "--text"))
    from rlinf_cli.report.page import report_runs

    return report_runs(runs, out, watch=watch)


def _one(runs: list[str] | None, option: str) -> str | None:
    """Return the only run, None for the default one."""
    if runs and len(runs) > 1:
        raise typer.BadParameter("it shows one run", param_hint=f"'{option}'")
    return runs[0] if runs else None


@command("rlinf compare runs/fast-* runs/slow-*", "rlinf compare runs/sweep-20260314-101502 -o sweep.png")
def compare(
    runs: Annotated[list[str], arg("RUN...", options.runs)],
    metrics: Annotated[
        list[str] | None,
        opt(
            "--metric NAME",
            "Metric to compare, a name in metrics.jsonl; by default the headline metric of evaluations, else of steps."
            " May be repeated: further ones are only drawn.",
        ),
    ] = None,
    out: Annotated[
        list[Path] | None,
        opt(
            "-o FILE",
            "Also write an HTML page, or draw the curves as .png, .svg or .pdf, several seeds as mean and range. May be"
            " repeated.",
        ),
    ] = None,
    x: Annotated[
        XAxis, opt("--x", "What results and curves are laid over: steps of different runs differ.")
    ] = XAxis.STEP,
) -> Result:
    """Compare runs: what differs, and whether by more than chance.

    RUN... are run folders, their names in the folder of runs, or folders of sweeps, whose runs are compared. The
    differences are listed with the most important first. Runs that differ only in their seeds form one set; with
    several runs in both sets the noise is estimated between seeds.
    """
    from rlinf_cli.report.page import compared_result

    return compared_result(runs, metrics or (), out or (), x)
