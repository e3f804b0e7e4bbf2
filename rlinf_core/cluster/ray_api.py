"""Ray's functions without Ray's partial types, imported when first used."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


@cache  # every group call asks, on both sides
def ray_api() -> Any:
    """The module `ray`, with its submodules that rlinf uses."""
    import_module("ray.util.scheduling_strategies")
    return import_module("ray")


def pickle_by_value(obj: object, keep: Callable[[Any], object]) -> bytes:
    """Pickles what plain pickle cannot name elsewhere, such as classes of the driver's script.

    Args:
        obj: what is to be pickled.
        keep: takes each buffer that stays outside of the stream.
    """
    stream: bytes = ray_api().cloudpickle.dumps(obj, protocol=5, buffer_callback=keep)
    return stream
