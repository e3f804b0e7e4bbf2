"""Lazily imported commands: each costs import time only when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

from rlinf_core.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# A package offers a command as `NAME = "module:app"`; `rich_help_panel` of the app is its heading in the help.
ENTRY_POINT_GROUP: Final = "rlinf.commands"
_OTHERS: Final = "Others"


class CommandFamily(NamedTuple):
    """Commands under one heading of `--help`, all modules of one package."""

    heading: str
    package: str
    names: tuple[str, ...]


class LazyGroup(TyperGroup):
    """A group whose commands are the `app`s of modules, and those of installed packages.

    Help loads all of them, a call only its own. A package cannot replace a built-in command.

    Attributes:
        families: the built-in commands by family, in help order; a command has the name of its module.
        removed: commands of an earlier version, each with what to use instead.
    """

    families: ClassVar[tuple[CommandFamily, ...]]
    removed: ClassVar[Mapping[str, str]] = {}

    @cached_property
    def offered(self) -> dict[str, EntryPoint]:
        """The commands of packages, by name; looked up only for names that are not built in."""
        from rlinf_core.process.entry_points import offered

        points = offered(ENTRY_POINT_GROUP)
        return {name: points[name] for name in sorted(points) if name not in self._packages}

    @cached_property
    def _packages(self) -> dict[str, str]:
        return {name: family.package for family in self.families for name in family.names}

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self._packages, *self.offered]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.removed:
            raise ConfigError(f"rlinf no longer has the command `{cmd_name}`", help=self.removed[cmd_name])
        is_command = cmd_name in self._packages or cmd_name in self.offered
        # For an unknown name all of them are loaded, to suggest the nearest.
        for name in (cmd_name,) if is_command else self.list_commands(ctx):
            if name not in self.commands:
                self.add_command(self._build(name), name)
        return super().get_command(ctx, cmd_name)

    def _build(self, name: str) -> Any:
        if name in self._packages:
            # A module cannot well be called by a word of the language, as in `rlinf import`.
            module = f"{name}_" if iskeyword(name) else name
            return get_command(import_module(f"{self._packages[name]}.{module}").app)
        point = self.offered[name]
        try:
            app: Any = point.load()
            built: Any = get_command(app)
        except Exception as error:  # noqa: BLE001 - a package of the user's may fail in any way
            return _broken(name, point.value, error)
        # Where Typer keeps it depends on its version.
        built.rich_help_panel = getattr(app, "rich_help_panel", app.info.rich_help_panel)
        return built

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # Typer adds the kind of Python's exception.
            error.message = error.message.removeprefix("Value error, ")
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under the headings of their families, summaries aligned."""
        headings: dict[str, list[str]] = {family.heading: list(family.names) for family in self.families}
        for name in self.offered:
            heading = self.get_command(ctx, name).rich_help_panel
            headings.setdefault(heading if isinstance(heading, str) else _OTHERS, []).append(name)
        width = max(len(name) for name in self.list_commands(ctx))
        room = formatter.width - 6 - width
        for heading, names in headings.items():
            rows = [(name.ljust(width), self.get_command(ctx, name).get_short_help_str(room)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(rows)


def command(
    function: Callable[..., None],
    *,
    examples: tuple[str, ...],
    no_args_is_help: bool = False,
    heading: str | None = None,
) -> typer.Typer:
    """Return the app of a module with a single command, named after its function.

    Args:
        examples: commands at the end of its help.
        heading: its heading in the help of `rlinf`, for the command of a package.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, rich_help_panel=heading)
    app.command(no_args_is_help=no_args_is_help, epilog=help_examples(*examples) if examples else None)(function)
    return app


def _broken(name: str, target: str, error: Exception) -> Any:
    """Return a command that says why the one of this name cannot be loaded."""
    reason = f"{type(error).__name__}: {error}"

    def fail() -> None:
        raise ConfigError(
            f"command `{name}` cannot be loaded: {reason}",
            why=f"its entry point is `{target}`",
            help="fix or remove the package that provides it",
        )

    fail.__doc__ = f"Cannot be loaded: {reason}"
    return get_command(command(fail, examples=()))


def help_examples(*commands: str) -> str:
    """Return the end of a command's help: commands that can be typed as they stand."""
    return "\n".join(("\b", "Examples:" if len(commands) > 1 else "Example:", *(f"  {line}" for line in commands)))
