"""A test of the sandbox for `rlinf doctor`, run where programs of a model would run.

    python -m recipes.language.sandbox.sandbox_probe

Its last output line is a JSON record.
"""

from __future__ import annotations

import json
import shutil
import subprocess

from recipes.language.sandbox import sandbox
from recipes.language.sandbox.memory_groups import memory_groups
from rlinf_core import ConfigError


def look() -> dict[str, str]:
    """Return the result of a test program for `rlinf doctor`: `verdict`, `what` and `help`."""
    try:
        sandbox.check()
    except ConfigError as error:
        return {"verdict": "fault", "what": f"{error.message}: {error.why}", "help": error.help or ""}
    together = "is bounded" if memory_groups() else "is not bounded: no control group of version 2 is delegated"
    what = f"{_version()} runs programs of a model; the memory of a program's processes together {together}"
    return {"verdict": "ok", "what": what, "help": ""}


def _version() -> str:
    """Return `bubblewrap 0.8.0`."""
    program = shutil.which("bwrap") or "bwrap"
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    print(json.dumps(look()))
