"""The front doors of recipes: what each lists is there, and opening one imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

DOORS = ("agent", "demonstrations", "embodied", "language")


@pytest.mark.parametrize("name", DOORS)
def test_door_has_what_it_lists(name: str) -> None:
    door = import_module(f"recipes.{name}")
    assert dir(door) == sorted(door.__all__)
    for public in door.__all__:
        assert getattr(door, public) is not None
    with pytest.raises(AttributeError, match="has no attribute 'gone'"):
        _ = door.gone


def test_doors_import_neither_ray_nor_torch() -> None:
    imports = "; ".join(f"import recipes.{name}" for name in DOORS)
    code = (
        f"import sys; {imports}; print([name for name in ('ray', 'torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
