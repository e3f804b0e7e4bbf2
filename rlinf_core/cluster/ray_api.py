"""Ray's functions without Ray's partial types, imported when first used."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Final

LOOPBACK: Final = "127.0.0.1"


@cache  # every group call asks, on both sides
def ray_api() -> Any:
    """The module `ray`, with its submodules that rlinf uses."""
    import_module("ray.util.scheduling_strategies")
    return import_module("ray")


@contextmanager
def loopback_only() -> Generator[None, None, None]:
    """A Ray that is started in here at `LOOPBACK` listens there and nowhere else.

    Ray takes a loopback address for a mistake and puts the machine's own in its place, but where clusters of several
    machines are off, as on macOS. Its processes listen everywhere unless they are given a loopback address.
    """
    constants: Any = import_module("ray._private.ray_constants")
    several = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = several


def pickle_by_value(obj: object, keep: Callable[[Any], object]) -> bytes:
    """Pickles what plain pickle cannot name elsewhere, such as classes of the driver's script.

    Args:
        obj: what is to be pickled.
        keep: takes each buffer that stays outside of the stream.
    """
    stream: bytes = ray_api().cloudpickle.dumps(obj, protocol=5, buffer_callback=keep)
    return stream
