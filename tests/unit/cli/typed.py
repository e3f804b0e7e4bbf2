"""Typed commands and how they end: `cli("validate", "a.yaml")`, `cli.out(...)`, `cli.fails(2, ...)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    """A command that is over."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Cli:
    """Runs command lines, in this process or as the installed command."""

    run: Callable[..., Ended]

    def __call__(self, *arguments: Any, **how: Any) -> Ended:
        return self.run(*arguments, **how)

    def out(self, *arguments: Any, **how: Any) -> str:
        """Return what a command prints that ends well."""
        return self.printed(0, *arguments, **how)

    def printed(self, code: int, *arguments: Any, **how: Any) -> str:
        """Return what a command prints that ends with a code."""
        ended = self.run(*arguments, **how)
        assert ended.code == code, ended
        return ended.out

    def fails(self, code: int, *arguments: Any, **how: Any) -> str:
        """Return the messages of a command that ends with a code."""
        ended = self.run(*arguments, **how)
        assert ended.code == code, ended
        return ended.err

    def refuses(self, code: int, *arguments: Any, **how: Any) -> str:
        """Return the messages of a command that ends with a code, and has no result."""
        ended = self.run(*arguments, **how)
        assert (ended.code, ended.out) == (code, "")
        return ended.err


def text_file(path: Path, text: str) -> Path:
    """Write a file, and return its path."""
    path.write_text(text, encoding="utf-8")
    return path
