"""The `rlinf` command: one Typer app, one exit code for every way it can end."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Annotated

import typer

from rlinf_cli.arguments.options import Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.console.interrupts import command_signals, ending_commands
from rlinf_cli.exit_codes import ExitCode, code_of
from rlinf_cli.lazy import CommandFamily, LazyGroup, help_examples
from rlinf_core.errors import RLinfError


class _Commands(LazyGroup):
    families = (
        CommandFamily(
            "Train", "rlinf_cli.commands.training", ("train", "sweep", "logs", "debug", "stop", "recipes", "init")
        ),
        CommandFamily("Check", "rlinf_cli.commands.checking", ("validate", "inspect", "explain", "schema", "import")),
        CommandFamily("Cluster", "rlinf_cli.commands.cluster", ("up", "status", "doctor", "down")),
        CommandFamily("Look back", "rlinf_cli.commands.results", ("runs", "why", "replay", "report", "compare")),
        CommandFamily("Use", "rlinf_cli.commands.policies", ("eval", "play", "export")),
    )
    removed = MappingProxyType({"chaos": "it tests rlinf itself: `make chaos JOB=FILE` in a checkout does what it did"})


# Plain help: it appears at once and reads the same in a terminal, a pipe and a log.
app = typer.Typer(
    name="rlinf",
    cls=_Commands,
    help="Distributed reinforcement learning on unlike machines, from one YAML file.",
    epilog=help_examples("rlinf train recipe=embodied", "rlinf validate hetero18", "rlinf inspect placement hetero18"),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from rlinf_core import __version__

        console.result(f"rlinf {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Options of every command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the app on `arguments`, by default the command line's, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets an escape instead of a crash.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with ending_commands():
            return _run(arguments)
    finally:
        console.close()


def _run(arguments: Sequence[str] | None) -> int:
    console.verbosity.quiet = console.verbosity.verbose = False
    return guarded(lambda: _named_user_runs(arguments))


def _named_user_runs(arguments: Sequence[str] | None) -> int | None:
    from rlinf_core.node.own_process import name_user

    if (home := name_user()) and "_RLINF_COMPLETE" not in os.environ:
        console.warn(f"HOME is not set, and user {os.getuid()} has no name: `{home}` is used as its home folder")
    return app(arguments, prog_name="rlinf")


def guarded(work: Callable[[], int | None]) -> int:
    """Run `work`; return its exit code. An error is printed first."""
    with console.escaping():
        try:
            return work() or ExitCode.OK
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else ExitCode.OK if end.code is None else ExitCode.FAILED
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        except Exception as error:  # noqa: BLE001 - the last line of defence: report a bug in rlinf, do not dump it
            # A signal's exception may have been replaced by another one on its way up.
            return command_signals.code or _report(error)


def _report(error: Exception) -> int:
    """Print why the command failed, and return its exit code."""
    if isinstance(error, RLinfError):
        _show(error)
        return code_of(error)
    if isinstance(error, OSError) and error.errno in console.OUTPUT_LOST and error.filename is None:
        console.error_block("the output cannot be written", why=error.strerror)
    else:
        _show_bug(error)
    return ExitCode.FAILED


def _show(error: RLinfError) -> None:
    if console.verbosity.verbose:
        import traceback

        console.error("".join(traceback.format_exception(error)).rstrip())
    else:
        console.error_block(error.message, where=error.where, why=error.why, do=error.help)


def _show_bug(error: Exception) -> None:
    import traceback

    if console.verbosity.verbose:
        console.error("".join(traceback.format_exception(error)).rstrip())
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    console.error_block(
        "this is a bug in rlinf, not in your input",
        where=f"{last.filename}:{last.lineno} in {last.name}" if last else None,
        why=f"{type(error).__name__}: {error}",
        do="please report it with the traceback"
        + (" above" if console.verbosity.verbose else ", which the same command with --verbose shows"),
    )
