"""The registry of accelerators by vendor, and the search for those of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from rlinf_core.errors import ConfigError
from rlinf_core.hardware.accelerators.accelerator import Accelerator, Device, Host
from rlinf_core.hardware.accelerators.vendors import Amd, Ascend, Intel, Musa, NoAccelerator, Nvidia

NONE = NoAccelerator()
# In order of preference on a node with devices of several vendors: dedicated compute devices first.
_ACCELERATORS: dict[str, Accelerator] = {
    accelerator.name: accelerator for accelerator in (Nvidia(), Ascend(), Amd(), Musa(), Intel(), NONE)
}


class Found(NamedTuple):
    """The accelerators of a node, all of one vendor."""

    accelerator: Accelerator
    devices: tuple[Device, ...]


def register_accelerator(accelerator: Accelerator) -> None:
    """Register a vendor. It takes precedence over the vendors registered before.

    Raises:
        ConfigError: the name is taken.
    """
    if accelerator.name in _ACCELERATORS:
        raise ConfigError(f"accelerator `{accelerator.name}` is registered twice", help="rename one of them")
    registered = dict(_ACCELERATORS)
    _ACCELERATORS.clear()
    _ACCELERATORS.update({accelerator.name: accelerator, **registered})


def accelerator_names() -> list[str]:
    """Return the known vendors, `none` last."""
    return list(_ACCELERATORS)


def get_accelerator(name: str) -> Accelerator:
    """Return the vendor called `name`.

    Raises:
        ConfigError: it does not exist.
    """
    accelerator = _ACCELERATORS.get(name)
    if accelerator is None:
        from rlinf_core.suggest import did_you_mean

        names = ", ".join(f"`{known_name}`" for known_name in _ACCELERATORS)
        raise ConfigError(f"unknown accelerator `{name}`", help=did_you_mean(name, _ACCELERATORS) or f"known: {names}")
    return accelerator


def accelerator_of_model(model: str | None) -> Accelerator:
    """Return the vendor of a model, by its name; NVIDIA for an unknown name."""
    name = (model or "").casefold()
    for accelerator in _ACCELERATORS.values():
        if name.startswith(accelerator.models):
            return accelerator
    return _ACCELERATORS[Nvidia.name]


def find_accelerators(host: Host | None = None, environ: Mapping[str, str] | None = None) -> Found:
    """Return the accelerators that a process with `environ` may use on `host`, by default this process; `none` without
    any.
    """
    host = Host() if host is None else host
    environ = os.environ if environ is None else environ
    for accelerator in _ACCELERATORS.values():
        devices = accelerator.available(host, environ)
        if devices:
            return Found(accelerator, devices)
    return Found(NONE, ())
