"""Commands as functions: options in, a `Result` out.

@command("rlinf runs", "rlinf runs prune --status failed --older-than 7d")
def runs(recipe: Annotated[str | None, opt("--recipe NAME", "Only runs of this recipe.")] = None) -> Result: ...
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer
from typer.core import TyperGroup

from rlinf_cli import console
from rlinf_cli.interrupts import command_signals
from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.suggest import did_you_mean, quoted


class Result(NamedTuple):
    """The result of a command.

    Attributes:
        text: the result as text, or a function that returns it.
        record: the result as data for `--json`, or a function that returns it.
        code: the exit code.
        notes: messages printed on standard error after the result, also with `--json`.
    """

    text: str | Callable[[], str] = ""
    record: Any = None
    code: int = 0
    notes: tuple[str, ...] = ()

    def show(self) -> None:
        """Print the result in the requested format.

        Raises:
            typer.BadParameter: JSON is requested of a result that is text alone, such as a script.
        """
        if console.verbosity.json and self.record is not None:
            console.result_json(self.record() if callable(self.record) else self.record)
        elif text := self.text() if callable(self.text) else self.text:
            if console.verbosity.json:
                raise typer.BadParameter("this result has no form in JSON", param_hint="'--json'")
            console.result(text)
        for note in self.notes:
            console.message(note)


Command: TypeAlias = Callable[..., Result | int | None]


def command(
    *examples: str,
    app: typer.Typer | None = None,
    name: str | None = None,
    heading: str | None = None,
    record: bool = True,
    needs: Mapping[str, str] | None = None,
    excludes: Mapping[str, str] | None = None,
) -> Callable[[Command], typer.Typer]:
    """Make a command from a function, which returns its result, or the exit code if it printed the result itself.

    Args:
        examples: complete commands at the end of its help.
        app: the group to which it belongs; by default it is a command of its own.
        name: its name in `app`; by default the function's.
        heading: its heading in the help of `rlinf`, for the command of a package.
        record: whether the result has a record for `--json`.
        needs: options, each with the options that require it, as in `{"--samples": "--step --order"}`.
        excludes: options, each with the options that it excludes, in the same form.
    """

    def register(function: Command) -> typer.Typer:
        own = typer.Typer(add_completion=False, rich_markup_mode=None, rich_help_panel=heading) if app is None else app
        answer = _Answer(function, record, needs or {}, excludes or {})
        # A command with required arguments shows its help if it is called without any.
        bare = any(
            parameter.default is parameter.empty for parameter in inspect.signature(function).parameters.values()
        )
        own.command(name, no_args_is_help=bare, epilog=help_examples(*examples))(answer)
        return own

    return register


class Group(TyperGroup):
    """A group of commands that suggests the nearest name for an unknown command.

    Attributes:
        default: the command to run if none is named, or None.
    """

    default: str | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.default is None or args[:1] in (["-h"], ["--help"]):
            return super().parse_args(ctx, args)
        bare = not args or args[0].startswith("-")
        return super().parse_args(ctx, [self.default, *args] if bare else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        command = self.get_command(ctx, args[0])
        if command is None:
            names = self.list_commands(ctx)
            listed = f"`{ctx.command_path} --help` lists them" if len(names) > 9 else f"there are {quoted(names)}"
            raise ConfigError(
                f"`{ctx.command_path}` has no command `{args[0]}`", help=did_you_mean(args[0], names) or listed
            )
        return args[0], command, args[1:]


def group(help: str, *, heading: str | None = None, cls: Any = Group, default: str | None = None) -> typer.Typer:
    """Return a group of commands; `default` is the command to run if none is named."""
    return typer.Typer(
        cls=type("Group", (cls,), {"default": default}) if default else cls,
        help=help or None,
        no_args_is_help=default is None,
        add_completion=False,
        rich_markup_mode=None,
        rich_help_panel=heading,
    )


def opt(spec: str, help: str = "", **settings: Any) -> Any:
    """Return an option for `Annotated`: `opt("--lines -n N", "Number of last lines.")`.

    Args:
        spec: the names of the option, and a placeholder if it takes a value.
        help: a sentence about the option.
        settings: further arguments of `typer.Option`.
    """
    names = [word for word in spec.split() if word.startswith("-")]
    value = " ".join(word for word in spec.split() if not word.startswith("-"))
    return typer.Option(*names, metavar=value or None, help=help, **settings)


def arg(name: str, complete: Any = None) -> Any:
    """Return a hidden argument for `Annotated`: the docstring describes it, and Typer would show its Python type."""
    return typer.Argument(metavar=name, hidden=True, autocompletion=complete)


def help_examples(*commands: str) -> str | None:
    """Return the examples at the end of a command's help, or None."""
    if not commands:
        return None
    return "\n".join(("\b", "Examples:" if len(commands) > 1 else "Example:", *(f"  {line}" for line in commands)))


def key_values(words: list[str] | None) -> dict[str, Any]:
    """Return `KEY=VALUE` options as a mapping, with values as a file has them: `0.2` is a number.

    Raises:
        typer.BadParameter: a word has no key or no `=`, a value is no YAML, or two words have the same key.
    """
    from rlinf_core.config.composing.overrides import parse_overrides
    from rlinf_core.config.diagnostics import Diagnostics
    from rlinf_core.config.tree import to_data
    from rlinf_core.scalars import plain

    pairs: dict[str, Any] = {}
    for word in words or ():
        key, equals, _ = word.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"`{word}` is not KEY=VALUE")
        if key in pairs:
            raise typer.BadParameter(f"`{key}` is given twice")
        diagnostics = Diagnostics()
        _, overrides = parse_overrides([word], diagnostics)
        value = overrides[0].value if overrides and diagnostics.ok else None
        if value is None:
            raise typer.BadParameter(next((finding.message for finding in diagnostics), f"`{word}` is not KEY=VALUE"))
        pairs[key] = plain(to_data(value))
    return pairs


def _exit_of_code(end: SystemExit) -> RLinfError:
    """Return the error for code that ended the command, such as a user's module with a bare `sys.exit(0)`."""
    last = traceback.extract_tb(end.__traceback__)[-1]
    return RLinfError(
        "the command was ended by code that it ran",
        where=f"{last.filename}:{last.lineno} in {last.name}",
        why=f"it called `sys.exit({'' if end.code is None else repr(end.code)})`",
        help="let it return or raise an error; in a module, put it below `if __name__ == '__main__':`",
    )


def _set(name: str) -> Callable[[bool], bool]:
    def setting(wanted: bool) -> bool:
        setattr(console.verbosity, name, getattr(console.verbosity, name) or wanted)
        return wanted

    return setting


Quiet = Annotated[bool, opt("--quiet -q", "Print results and errors only.", callback=_set("quiet"))]
Verbose = Annotated[bool, opt("--verbose -v", "Print more detail, and tracebacks.", callback=_set("verbose"))]
_Json = Annotated[bool, opt("--json", "Print the result as JSON.", callback=_set("json"))]


class _Answer:
    """A function with the options of every command, which prints the result and exits with its code.

    Its annotations are evaluated lazily, since the help of `rlinf` needs only the summaries of the commands.
    """

    def __init__(self, function: Command, record: bool, needs: Mapping[str, str], excludes: Mapping[str, str]) -> None:
        added: Mapping[str, Any] = {**({"as_json": _Json} if record else {}), "quiet": Quiet, "verbose": Verbose}
        self._function, self._added = function, added
        self._needs, self._excludes = needs, excludes
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __call__(self, context: typer.Context, **arguments: Any) -> None:
        for option in self._added:
            del arguments[option]
        self._check_together(context)
        for parameter in context.command.params:
            value = arguments.get(parameter.name or "")
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"{value} is not a finite number", param_hint=f"'{parameter.opts[0]}'")
        try:
            result = self._function(**arguments)
        except SystemExit as end:
            # A signal raises it, too.
            command_signals.check()
            raise _exit_of_code(end) from end
        if isinstance(result, Result):
            result.show()
            result = result.code
        if result:
            raise typer.Exit(result)

    def _check_together(self, context: typer.Context) -> None:
        """Reject options that would have no effect.

        Raises:
            typer.BadParameter: an option is given without one that it requires, or with one that excludes it.
        """
        if not self._needs and not self._excludes:
            return
        typed = {
            name
            for parameter in context.command.params
            if (source := context.get_parameter_source(parameter.name or "")) and source.name == "COMMANDLINE"
            for name in parameter.opts
        }
        for option, others in self._needs.items():
            for other in others.split():
                if other in typed and option not in typed:
                    raise typer.BadParameter(f"it goes with {option}", param_hint=f"'{other}'")
        for option, others in self._excludes.items():
            for other in others.split():
                if other in typed and option in typed:
                    raise typer.BadParameter(f"it cannot be used with {option}", param_hint=f"'{other}'")

    @cached_property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._function, eval_str=True)
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        options = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
            for option, annotation in self._added.items()
        ]
        return signature.replace(parameters=[*signature.parameters.values(), context, *options])

    @property
    def __annotations__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {parameter.name: parameter.annotation for parameter in self.__signature__.parameters.values()}
