"""A person beside an env worker whose interpreter has no torch."""

from __future__ import annotations

import sys
from typing import Any

from recipes.embodied.interventions.intervention import Steerable
from tests.every_third import EveryThird

# Of the interpreter, and its first line.
NAME = "no_torch"
FIRST_LINE = "import sys; sys.modules['torch'] = None"


class WithoutTorch(EveryThird):
    """Takes over where the interpreter is that one, and nowhere else."""

    def __init__(self, env: Steerable, options: Any) -> None:
        super().__init__(env, options)
        if sys.modules.get("torch") is not None or not sys.prefix.endswith(NAME):
            raise RuntimeError(f"the interpreter is that of {sys.prefix}")
