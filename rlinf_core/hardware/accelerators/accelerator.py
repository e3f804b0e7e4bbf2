"""The facts about a vendor's accelerators that rlinf needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rlinf_core.hardware.accelerators.host import Host


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator of a node.

    Attributes:
        index: its number in the vendor's own order, the one that the visibility variable takes.
        model: its name as the vendor spells it, or None when it cannot be told without the vendor's tools.
        uuid: a name that never moves, where the vendor gives one; the visibility variable takes it too.
    """

    index: int
    model: str | None = None
    uuid: str | None = None


class Accelerator(ABC):
    """A vendor's accelerators.

    Attributes:
        name: how messages, placements and the registry call the vendor.
        visibility_variable: the environment variable that lists the devices a process may see, or None.
        torch_device: the device type under which torch knows them.
        models: beginnings of model names, lower case, that only this vendor uses; for files that declare a model
            while no node can be asked.
    """

    name: ClassVar[str]
    visibility_variable: ClassVar[str | None]
    torch_device: ClassVar[str]
    models: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def devices(self, host: Host) -> tuple[Device, ...]:
        """Return the accelerators of `host` in ascending index; empty when it has none. Never raises for what is
        missing.
        """

    def available(self, host: Host, environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that a process with `environ` may use, in the order its visibility variable lists them.

        An unset variable hides nothing, an empty one everything. As the vendors' runtimes do, the list ends at the
        first entry that names no device.
        """
        found = self.devices(host)
        listed = environ.get(self.visibility_variable) if self.visibility_variable else None
        if listed is None:
            return found
        chosen: list[Device] = []
        for entry in listed.split(","):
            device = _named(entry.strip(), found)
            if device is None or device in chosen:
                break
            chosen.append(device)
        return tuple(chosen)


def _named(entry: str, devices: tuple[Device, ...]) -> Device | None:
    if entry.isdecimal():
        return next((device for device in devices if device.index == int(entry)), None)
    matches = [device for device in devices if entry and device.uuid and device.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
