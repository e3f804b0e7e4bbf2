"""Commands that are imported and built when they are asked for, so that each costs only those who call it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from keyword import iskeyword
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup
from typer.main import get_command


class LazyGroup(TyperGroup):
    """A group whose commands are the `app`s of modules. Help builds them all, a call only the one it names.

    Attributes:
        package: where the modules are.
        names: the commands, each called as its module, in the order in which help lists them.
    """

    package: ClassVar[str]
    names: ClassVar[tuple[str, ...]]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # A name that nobody has is compared with all of them, to guess which was meant.
        for name in (cmd_name,) if cmd_name in self.names else self.names:
            if name not in self.commands:
                # A module cannot well be called by a word of the language, as in `rlinf import`.
                module = f"{name}_" if iskeyword(name) else name
                self.add_command(get_command(import_module(f"{self.package}.{module}").app), name)
        return super().get_command(ctx, cmd_name)


def command(function: Callable[..., None], *, no_args_is_help: bool = False) -> typer.Typer:
    """Return the app of a module that holds one command, called as its function."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(no_args_is_help=no_args_is_help)(function)
    return app
