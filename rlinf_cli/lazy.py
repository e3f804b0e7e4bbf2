"""Commands that are imported and built when they are asked for, so that each costs only those who call it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from keyword import iskeyword
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command


class CommandFamily(NamedTuple):
    """Commands that help lists under one heading, and that are modules of one package."""

    heading: str
    package: str
    names: tuple[str, ...]


class LazyGroup(TyperGroup):
    """A group whose commands are the `app`s of modules. Help builds them all, a call only the one it names.

    Attributes:
        families: the commands, each called as its module, in the order in which help lists them.
    """

    families: ClassVar[tuple[CommandFamily, ...]]

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for family in self.families for name in family.names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known = {name: family.package for family in self.families for name in family.names}
        # An unknown name is compared with all of them, to guess which was meant.
        for name in (cmd_name,) if cmd_name in known else known:
            if name not in self.commands:
                # A module cannot well be called by a word of the language, as in `rlinf import`.
                module = f"{name}_" if iskeyword(name) else name
                self.add_command(get_command(import_module(f"{known[name]}.{module}").app), name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under the headings of their families, all summaries in one column."""
        width = max(len(name) for name in self.list_commands(ctx))
        for family in self.families:
            commands = [(name, self.get_command(ctx, name)) for name in family.names]
            room = formatter.width - 6 - width
            rows = [(name.ljust(width), command.get_short_help_str(room)) for name, command in commands]
            with formatter.section(family.heading):
                formatter.write_dl(rows)


def command(function: Callable[..., None], *, no_args_is_help: bool = False) -> typer.Typer:
    """Return the app of a module that holds one command, called as its function."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(no_args_is_help=no_args_is_help)(function)
    return app
