"""Commands are imported when they are called, and none is forgotten."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import rlinf_cli.commands

# `import_` holds `rlinf import`: no module can be called by a word of the language.
NAMES = [
    module.name.removesuffix("_")
    for family in iter_modules(rlinf_cli.commands.__path__, "rlinf_cli.commands.")
    for module in iter_modules(import_module(family.name).__path__)
]


def test_help_lists_every_command(cli: Callable[..., Any]) -> None:
    listed = cli("--help").out.partition("Train:\n")[2].partition("\n  Examples:")[0].splitlines()
    assert sorted(line.split()[0] for line in listed if line.startswith("  ") and line[2] != " ") == sorted(NAMES)


def test_a_call_imports_its_own_command_only() -> None:
    program = (
        "import sys\nfrom rlinf_cli.main import main\nmain(['schema', '--help'])\n"
        "package = 'rlinf_cli.commands.'\n"
        "print(*(name for name in sys.modules if name.startswith(package)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["rlinf_cli.commands.checking", "rlinf_cli.commands.checking.schema"]
