"""Lazily imported commands: each costs import time only when it is called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from keyword import iskeyword
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command


class CommandFamily(NamedTuple):
    """Commands under one heading of `--help`, all modules of one package."""

    heading: str
    package: str
    names: tuple[str, ...]


class LazyGroup(TyperGroup):
    """A group whose commands are the `app`s of modules. Help loads all of them, a call only its own.

    Attributes:
        families: the commands by family, in help order; a command has the name of its module.
    """

    families: ClassVar[tuple[CommandFamily, ...]]

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for family in self.families for name in family.names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known = {name: family.package for family in self.families for name in family.names}
        # For an unknown name all of them are loaded, to suggest the nearest.
        for name in (cmd_name,) if cmd_name in known else known:
            if name not in self.commands:
                # A module cannot have a keyword's name, as in `rlinf import`.
                module = f"{name}_" if iskeyword(name) else name
                self.add_command(get_command(import_module(f"{known[name]}.{module}").app), name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under the headings of their families, summaries aligned."""
        width = max(len(name) for name in self.list_commands(ctx))
        for family in self.families:
            commands = [(name, self.get_command(ctx, name)) for name in family.names]
            room = formatter.width - 6 - width
            rows = [(name.ljust(width), command.get_short_help_str(room)) for name, command in commands]
            with formatter.section(family.heading):
                formatter.write_dl(rows)


def command(function: Callable[..., None], *, examples: tuple[str, ...], no_args_is_help: bool = False) -> typer.Typer:
    """Return the app of a module with a single command, named after its function."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(no_args_is_help=no_args_is_help, epilog=help_examples(*examples))(function)
    return app


def help_examples(*commands: str) -> str:
    """Return the end of a command's help: commands that can be typed as they stand."""
    return "\n".join(("\b", "Examples:" if len(commands) > 1 else "Example:", *(f"  {line}" for line in commands)))
