"""`rlinf inspect hardware`: the hardware of the nodes against the file's declarations."""

from __future__ import annotations

import typer

from rlinf_cli.arguments.cluster_options import FileIfAny, NameOption, Parallel
from rlinf_cli.arguments.options import Output, OutputOption, Overrides, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode


def hardware(
    file: FileIfAny = None,
    overrides: Overrides = None,
    name: NameOption = None,
    parallel: Parallel = 128,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show the accelerators, robots and cameras of the nodes, found against declared.

    Probes the machines of FILE, or those of the running cluster. The exit status is 1 if declared hardware is missing,
    3 if a node cannot be reached.
    """
    from rlinf_cli.bootstrap.checks.devices import judged
    from rlinf_cli.bootstrap.checks.finding import CheckVerdict
    from rlinf_cli.machines.probing import look_at_hardware
    from rlinf_cli.render.hardware_table import hardware_record, hardware_text

    nodes, look = look_at_hardware(file, overrides, name, parallel=parallel)
    findings = [*look.findings, *judged(look.probed)]
    if output is Output.JSON:
        console.result_json(hardware_record(nodes, look.probed, findings))
    else:
        console.result(hardware_text(nodes, look.probed, findings))
    verdicts = {finding.verdict for finding in findings}
    if CheckVerdict.UNREACHABLE in verdicts:
        raise typer.Exit(ExitCode.UNREACHABLE)
    if CheckVerdict.FAULT in verdicts:
        raise typer.Exit(ExitCode.FAILED)
