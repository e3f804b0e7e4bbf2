"""The `rlinf` command: its Typer app, error messages and exit codes."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Annotated, Final

import typer

from rlinf_cli import console
from rlinf_cli.command import Quiet, Verbose, help_examples, opt
from rlinf_cli.interrupts import ExitCode, code_of, command_signals, ending_commands
from rlinf_cli.lazy import LazyGroup
from rlinf_cli.runs import run_lookup
from rlinf_core.errors import RLinfError
from rlinf_core.suggest import did_you_mean

# Pydantic's message about a value of the wrong type.
_PYDANTIC: Final = re.compile(r"Input should be a valid (\w+), .*")


class _Commands(LazyGroup):
    families = MappingProxyType(
        {
            "Jobs": {
                "train": "rlinf_cli.commands.jobs",
                "validate": "rlinf_cli.commands.jobs",
                "inspect": "rlinf_cli.commands.jobs",
                "explain": "rlinf_cli.commands.jobs",
                "init": "rlinf_cli.commands.jobs",
            },
            "Machines": dict.fromkeys(("up", "status", "down", "doctor"), "rlinf_cli.commands.machines"),
            "Runs": {
                **dict.fromkeys(("ps", "logs", "stop"), "rlinf_cli.commands.runs"),
                "runs": "rlinf_cli.commands.runs",
            },
            "Results": dict.fromkeys(("why", "report", "compare"), "rlinf_cli.commands.runs"),
            "Policies": {
                "eval": "rlinf_cli.commands.policies:evaluate",
                "export": "rlinf_cli.commands.policies",
                "import": "rlinf_cli.commands.policies:app",
            },
        }
    )
    removed = MappingProxyType({"chaos": "it tests rlinf itself: `make chaos JOB=FILE` in a checkout does what it did"})


# Help is plain text: it appears at once and reads the same in a terminal, a pipe and a log.
app = typer.Typer(
    name="rlinf",
    cls=_Commands,
    help="Distributed reinforcement learning on mixed clusters, from one YAML file.",
    epilog=help_examples("rlinf train embodied", "rlinf validate hetero18", "rlinf inspect hetero18"),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Errors of files that no code can prevent.
_OF_THE_MACHINE: Final = (errno.EACCES, errno.EDQUOT, errno.EIO, errno.ENAMETOOLONG, errno.ENOSPC, errno.EROFS)


def _version(wanted: bool) -> None:
    if wanted:
        from rlinf_core import __version__

        console.result(f"rlinf {__version__}")
        raise typer.Exit


def _runs_dir(folder: str | None) -> str | None:
    run_lookup.choose_runs_folder(folder)
    return folder


@app.callback()
def root(
    version: Annotated[bool, opt("--version", "Show the version and exit.", callback=_version, is_eager=True)] = False,
    runs_dir: Annotated[
        str | None,
        opt("--runs-dir FOLDER", "Folder of the runs; by default RLINF_RUNS, else `runs`.", callback=_runs_dir),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Options of every command."""
    try:
        os.getcwd()
    except OSError as error:
        help = "change to a folder that exists"
        raise RLinfError("the working folder does not exist", why=error.strerror, help=help) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the app on `arguments`, by default the command line's, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets an escape instead of a crash.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with ending_commands():
            console.verbosity.reset()
            return guarded(lambda: _run(arguments))
    finally:
        console.close()


def _run(arguments: Sequence[str] | None) -> int | None:
    from rlinf_core.node.own_process import name_user

    if (home := name_user()) and "_RLINF_COMPLETE" not in os.environ:
        console.warn(f"HOME is not set, and user {os.getuid()} has no name: `{home}` is used as its home folder")
    return app(arguments, prog_name="rlinf", standalone_mode=False)


def guarded(work: Callable[[], int | None]) -> int:
    """Run `work` and return its exit code; print its error, if any."""
    with console.escaping():
        try:
            return work() or ExitCode.OK
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else ExitCode.OK if end.code is None else ExitCode.FAILED
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        except Exception as error:  # noqa: BLE001 - the last line of defence: report a bug in rlinf, do not dump it
            # Another exception may have replaced the one that a signal raised.
            return command_signals.code or _report(error)


def _report(error: Exception) -> int:
    """Print why the command failed, and return its exit code."""
    if isinstance(error, RLinfError):
        _show(error)
        return code_of(error)
    if isinstance(error, typer.TyperException):
        _show_usage(error)
        return error.exit_code
    if isinstance(error, (typer.Abort, EOFError)):
        console.error_block("aborted")
        return ExitCode.FAILED
    if isinstance(error, OSError) and error.errno in console.OUTPUT_LOST and error.filename is None:
        console.error_block("the output cannot be written", why=error.strerror)
    elif isinstance(error, OSError) and error.errno in _OF_THE_MACHINE and error.filename is not None:
        help = "fix its permissions, free disk space, or name another place"
        console.error_block("a file or folder cannot be used", where=str(error.filename), why=error.strerror, do=help)
    else:
        _show_bug(error)
    return ExitCode.FAILED


def _show(error: RLinfError) -> None:
    if console.verbosity.verbose:
        import traceback

        console.error("".join(traceback.format_exception(error)).rstrip())
    else:
        console.error_block(error.message, where=error.where, why=error.why, do=error.help)


def _show_usage(error: typer.TyperException) -> None:
    """Print an error in the words of a command line."""
    text = error.format_message()
    if text.startswith("Usage: "):
        # The command was called without its required arguments.
        console.error(text)
        return
    details = vars(error)
    if isinstance(error, typer.BadParameter) and error.message and not (error.param_hint or error.param):
        text = error.message
    help = _nearest(error.message, details.get("option_name"), details.get("possibilities"))
    if help is None and details.get("ctx") is not None:
        help = f"`{details['ctx'].command_path} --help` shows how it is called"
    text = _PYDANTIC.sub(r"expected a valid \1", text.partition(" (Possible options: ")[0])
    console.error_block(f"{text[0].lower()}{text[1:]}".rstrip("."), do=help)


def _nearest(message: str, option: str | None, possibilities: Sequence[str] | None) -> str | None:
    """Return a suggestion of the option or choice that was probably meant, or None."""
    if option is not None:
        return did_you_mean(option, possibilities or ())
    choice, of, choices = message.partition(" is not one of ")
    return did_you_mean(choice.strip("'"), [name.strip(" '.") for name in choices.split(",")]) if of else None


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
