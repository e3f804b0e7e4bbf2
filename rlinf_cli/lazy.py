"""Command groups that import a command when it is called, and accept earlier names of commands and options."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from itertools import takewhile
from typing import Any, ClassVar, Final, NamedTuple

import typer
from typer.core import TyperCommand
from typer.main import get_command

from rlinf_cli import console
from rlinf_cli.command import Group, command
from rlinf_cli.runs import run_lookup
from rlinf_core.errors import ConfigError
from rlinf_core.process.import_path import EntryPoint

_VALUE: Final = "VALUE"


class EarlierName(NamedTuple):
    """The earlier name of a command or an option.

    Attributes:
        old: the words of the command, or the option; `VALUE` stands for its value, or for the first argument.
        new: the replacement; empty for an option that has no effect any more.
        of: the current name of the command that an option belongs to; empty for any command.
    """

    old: str
    new: str
    of: str = ""


COMMANDS: Final = (
    EarlierName("sweep", "train"),
    EarlierName("recipes", "train"),
    EarlierName("schema", "explain --schema"),
    EarlierName("inspect workers", "ps"),
    EarlierName("debug", "ps --attach"),
    EarlierName("replay", "why --replay VALUE"),
    EarlierName("samples", "report --samples"),
    EarlierName("play", "eval --play"),
    EarlierName("env", "venv"),
)
OPTIONS: Final = (
    *(EarlierName(f"{option} json", "--json") for option in ("--output", "-o")),
    *(EarlierName(f"{option} text", "") for option in ("--output", "-o")),
    *(EarlierName(f"{option} github", "--github", "validate") for option in ("--output", "-o")),
    EarlierName("--log-path VALUE", "--runs-dir VALUE"),
    EarlierName("--out VALUE", "-o VALUE"),
    EarlierName("--svg VALUE", "-o VALUE", "inspect"),
    EarlierName("--tree", "--all", "inspect"),
    EarlierName("--plot VALUE", "-o VALUE", "compare"),
    EarlierName("--html VALUE", "-o VALUE", "compare"),
    EarlierName("--save VALUE", "-o VALUE", "robot"),
    EarlierName("--live", "--watch", "report"),
    EarlierName("--port VALUE", "", "report"),
    EarlierName("--component VALUE", "VALUE", "logs"),
    EarlierName("--rank VALUE", ":VALUE", "logs"),
)


def command_now(words: Sequence[str]) -> EarlierName | None:
    """Return the row of the earlier command name that a command line begins with, or None."""
    return next((row for row in COMMANDS if list(words[: len(row.old.split())]) == row.old.split()), None)


def renewed(words: Sequence[str], known: Container[str]) -> tuple[list[str], list[str]]:
    """Return a command line with the current names of its options, and a description of each change.

    Args:
        words: the command and its arguments.
        known: the options of the command, which are not taken for earlier names.
    """
    renewed: list[str] = []
    changes: list[str] = []
    at = 0
    while at < len(words) and words[at] != "--":
        for row in OPTIONS:
            size, value = _matched(row.old.split(), words[at:])
            replacement = [part.replace(_VALUE, value) for part in row.new.split()]
            if size and row.of in ("", words[0]) and _is_meant(row, replacement, known):
                old, new = " ".join(words[at : at + size]), " ".join(replacement)
                changes.append(f"`{old}` is now `{new}`" if new else f"`{old}` has no effect any more")
                renewed += replacement
                at += size
                break
        else:
            renewed.append(words[at])
            at += 1
    return [*renewed, *words[at:]], changes


def with_command(row: EarlierName, rest: Sequence[str]) -> list[str]:
    """Return the command line with the current name of a command; `rest` followed the earlier name."""
    name, *option = row.new.split()
    # If the option takes the first argument as its value, put the option before that argument.
    takes = option[-1:] == [_VALUE]
    flags = list(takewhile(lambda word: takes and word.startswith("-"), rest))
    return [name, *flags, *(option[:-1] if takes else option), *rest[len(flags) :]]


def _matched(pattern: Sequence[str], words: Sequence[str]) -> tuple[int, str]:
    """Return the number of words of an option with its value, and the value; 0 if it is another option."""
    name, equals, value = words[0].partition("=") if words[0].startswith("--") else (words[0], "", "")
    if name != pattern[0]:
        return 0, ""
    if len(pattern) == 1:
        return (0, "") if equals else (1, "")
    size = 1 if equals else 2
    if size > len(words):
        return 0, ""
    value = value if equals else words[1]
    return (size, value) if pattern[1] in (_VALUE, value) else (0, "")


def _is_meant(row: EarlierName, replacement: Sequence[str], known: Container[str]) -> bool:
    """Return whether the command has the new name of an option, and not the earlier name.

    `-o` is the exception: it names a file now, but `-o json` most likely means the earlier option.
    """
    name = row.old.split()[0]
    return (name not in known or name == "-o") and (
        not replacement or not replacement[0].startswith("-") or replacement[0] in known
    )


# A package offers a command as `NAME = "module:app"`; `rich_help_panel` of the app is its heading in the help.
ENTRY_POINT_GROUP: Final = "rlinf.commands"
_OTHERS: Final = "Others"
_RUNS_DIR: Final = "--runs-dir"


class LazyGroup(Group):
    """The commands of `rlinf` and of installed packages.

    Help loads every command, a call only the called one. A package cannot replace a built-in command.

    Attributes:
        families: the module of each built-in command by heading, in help order.
        removed: commands of an earlier version, each with its replacement.
    """

    families: ClassVar[Mapping[str, Mapping[str, str]]]
    removed: ClassVar[Mapping[str, str]] = {}

    @cached_property
    def offered(self) -> dict[str, EntryPoint]:
        """The commands of packages by name; looked up only for names that are not built in.

        Packages cannot use the earlier names of built-in commands.
        """
        from rlinf_core.process.import_path import offered

        points = offered(ENTRY_POINT_GROUP)
        return {name: points[name] for name in sorted(points) if name not in self._modules and not command_now([name])}

    @cached_property
    def _modules(self) -> dict[str, str]:
        return {name: module for family in self.families.values() for name, module in family.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self._modules, *self.offered]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and (cmd_name in self._modules or cmd_name in self.offered):
            self.add_command(self._build(cmd_name), cmd_name)
        return super().get_command(ctx, cmd_name)

    def _build(self, name: str) -> Any:
        app = self._app(name)
        try:
            return get_command(app)
        except Exception as error:
            if name in self._modules:
                raise
            return get_command(_broken(name, self.offered[name].value, error))

    def _app(self, name: str) -> Any:
        """Return the Typer app of a command."""
        if name in self._modules:
            module, _, attribute = self._modules[name].partition(":")
            return getattr(import_module(module), attribute or name)
        point = self.offered[name]
        try:
            app = point.load()
            if not isinstance(app, typer.Typer):
                raise TypeError("it is not a Typer app")
            return app
        except Exception as error:  # noqa: BLE001 - a package of the user's may fail in any way
            return _broken(name, point.value, error)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of a command line; accept earlier names of the command and its options."""
        if args[0] in self.removed:
            raise ConfigError(f"rlinf no longer has the command `{args[0]}`", help=self.removed[args[0]])
        row = command_now(args)
        words = args if row is None else [row.new.split()[0], *args[len(row.old.split()) :]]
        words, changes = renewed(words, set(options_of(self.get_command(ctx, words[0]))))
        if row is not None:
            words = with_command(row, words[1:])
            changes.insert(0, f"`rlinf {row.old}` is now `rlinf {row.new.removesuffix(' VALUE')}`")
        if changes and not {"-q", "--quiet"} & set(args):
            console.warn(", ".join(changes))
        return super().resolve_command(ctx, _without_folder(words))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # Typer prefixes the class of the Python exception.
            error.message = error.message.removeprefix("Value error, ")
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under the headings of their families, summaries aligned."""
        headings: dict[str, list[str]] = {heading: list(family) for heading, family in self.families.items()}
        apps = {name: self._app(name) for name in self.list_commands(ctx)}
        for name in self.offered:
            # The attribute that holds the heading depends on Typer's version.
            heading = getattr(apps[name], "rich_help_panel", apps[name].info.rich_help_panel)
            headings.setdefault(heading if isinstance(heading, str) else _OTHERS, []).append(name)
        width = max(len(name) for name in apps)
        room = formatter.width - 6 - width
        for heading, names in headings.items():
            rows = [(name.ljust(width), _summary(apps[name], room)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(rows)


def options_of(command: Any) -> Iterator[str]:
    """Yield the options of a command and of its subcommands."""
    if command is None:
        return
    yield _RUNS_DIR
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for name in getattr(command, "commands", ()):
        yield from options_of(command.commands[name])


def _without_folder(words: list[str]) -> list[str]:
    """Apply and remove `--runs-dir FOLDER`, an option of `rlinf` itself, after the command as well."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if word == "--":
            return [*kept, word, *rest]
        if name != _RUNS_DIR:
            kept.append(word)
            continue
        run_lookup.choose_runs_folder(value if equals else next(rest, ""))
    return kept


def _broken(name: str, target: str, error: Exception) -> Any:
    """Return an app whose command reports why the command of a package cannot be loaded."""
    reason = f"{type(error).__name__}: {error}"

    def fail() -> None:
        raise ConfigError(
            f"command `{name}` cannot be loaded: {reason}",
            why=f"its entry point is `{target}`",
            help="fix or remove the package that provides it",
        )

    fail.__doc__ = f"Cannot be loaded: {reason}"
    return command(record=False)(fail)


def _summary(app: Any, room: int) -> str:
    """Return the first sentence of an app's help, at most `room` characters, without building its command."""
    alone = not app.registered_groups and len(app.registered_commands) == 1 and app.registered_callback is None
    info = app.registered_commands[0] if alone else app.info
    help = info.help if isinstance(info.help, str) else inspect.getdoc(info.callback) if info.callback else None
    return TyperCommand(None, help=help).get_short_help_str(room)
