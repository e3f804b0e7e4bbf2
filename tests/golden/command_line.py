"""Commands of `rlinf`, run in this process, with answers that no machine and no user changes."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import rlinf_core
from rlinf_cli import console
from rlinf_cli.main import main

REPOSITORY: Final = Path(rlinf_core.__file__).parents[1]


def rlinf(*words: str, environ: Mapping[str, str] | None = None) -> tuple[int, Any]:
    """Run `rlinf` in the working folder; return its exit code and the JSON that it prints, None where it is none.

    The environment is `environ` alone, with the working folder as the home.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), _environment(environ or {}):
        try:
            code = int(main(list(words)))
        finally:
            console.verbosity.reset()
    text = out.getvalue().replace(f"{REPOSITORY}/", "").replace(f"{Path.cwd()}/", "")
    try:
        return code, json.loads(text)
    except json.JSONDecodeError:
        return code, None


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update({"PATH": before["PATH"], "HOME": os.getcwd(), "USER": "someone", **environ})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
