"""rlinf_core: configuration, placement and the worker runtime that the `rlinf` command uses.

The public names are listed in `__init__.pyi` and imported on first use, so that reading a configuration never pays for
ray or torch.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

from rlinf_core.process.import_path import pin_own_packages

pin_own_packages()


@cache
def _public() -> dict[str, str]:
    """Return the module that defines each public name."""
    with open(os.path.splitext(__file__)[0] + ".pyi", encoding="utf-8") as stub:
        lines = [line.split() for line in stub if line.startswith("from ")]
    return {words[-1]: words[1] for words in lines}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return list(_public())
    module = _public().get(name)
    if module is None:
        raise AttributeError(f"module 'rlinf_core' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_public())
