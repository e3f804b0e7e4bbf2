"""A command as a package of a user's own offers it."""

from __future__ import annotations

from typing import Annotated

from rlinf_cli.command import Result, command, opt


@command("rlinf greet you", heading="Friends", record=False)
def app(name: str, how: Annotated[str, opt("--out HOW", "How to say it.")] = "") -> Result:
    """Greet somebody."""
    return Result(f"hello {name}" + (f", {how}" if how else ""))
