"""A command as a package of a user's own offers it."""

from __future__ import annotations

from rlinf_cli.console import console
from rlinf_cli.lazy import command


def greet(name: str) -> None:
    """Greet somebody."""
    console.result(f"hello {name}")


app = command(greet, examples=("rlinf greet you",), heading="Friends")
