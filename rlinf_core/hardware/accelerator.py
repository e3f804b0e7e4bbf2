"""The interface of a vendor's accelerators, and the machine on which they are detected."""

from __future__ import annotations

import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

# A driver reset can block the vendor's tool for minutes; after this time, device files are used instead.
TOOL_TIMEOUT_S = 10.0


def run_tool(command: Sequence[str]) -> str | None:
    """Return the standard output of a vendor's tool, or None if it is missing, fails or takes longer than 10 s."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


class Host:
    """A machine, seen through its files and its vendors' tools; tests replace both."""

    def __init__(self, root: Path = Path("/"), run: Callable[[Sequence[str]], str | None] = run_tool) -> None:
        self._root = root
        self.run = run

    def exists(self, path: str) -> bool:
        return self._at(path).exists()

    def read(self, path: str) -> str | None:
        """Return the stripped text of a file, or None if it cannot be read."""
        try:
            return self._at(path).read_text(errors="replace").strip()
        except OSError:
            return None

    def resolve(self, path: str) -> str:
        """Return the last part of a link's target: `0000:3a:00.0` for a device in sysfs."""
        return self._at(path).resolve().name

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder in natural order; empty if it cannot be read."""
        try:
            names = [path.name for path in self._at(folder).iterdir()]
        except OSError:
            return []
        return sorted(names, key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)])

    def numbered(self, folder: str, prefix: str) -> list[int]:
        """Return N of every `prefixN` in a folder, ascending."""
        pattern = re.compile(re.escape(prefix) + r"(\d+)\Z", re.ASCII)
        return sorted(int(match[1]) for name in self.names(folder) if (match := pattern.match(name)))

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator of a node.

    Attributes:
        index: its number in the vendor's order, as in the visibility variable.
        model: its name in the vendor's spelling, or None if unknown without the vendor's tools.
        uuid: a stable name, if the vendor has one; also valid in the visibility variable.
        divided: whether it is a part of a device, which only `uuid` identifies.
        marks: its names among all devices of the machine, in every process, for claims, with the names of its parts;
            empty for its `uuid`, or without one its index.
    """

    index: int
    model: str | None = None
    uuid: str | None = None
    divided: bool = False
    marks: tuple[str, ...] = field(default=(), compare=False)

    @property
    def identities(self) -> tuple[str, ...]:
        """Its names among all devices of the machine, the same in every job and container."""
        return self.marks or (self.uuid or str(self.index),)

    @property
    def visible_id(self) -> str:
        """Its name in the visibility variable of a process."""
        return self.uuid if self.divided and self.uuid else str(self.index)


class Accelerator(ABC):
    """A vendor's accelerators.

    Attributes:
        name: the vendor's name in messages, placements and the registry.
        visibility_variable: the environment variable that lists the visible devices, or None.
        torch_device: their device type in torch.
        models: lower-case prefixes of model names unique to this vendor, for checking files offline.
    """

    name: ClassVar[str]
    visibility_variable: ClassVar[str | None]
    torch_device: ClassVar[str]
    models: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def devices(self, host: Host) -> tuple[Device, ...]:
        """Return the accelerators of `host` by ascending index; empty if there are none. Never raises for missing tools
        or files.
        """

    def available(self, host: Host, environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that a process with `environ` may use, in the order of its visibility variable.

        An unset variable hides nothing, an empty one everything.
        """
        devices = self.devices(host)
        listed = environ.get(self.visibility_variable) if self.visibility_variable else None
        return devices if listed is None else self._listed(listed, devices, host)

    def _listed(self, listed: str, devices: tuple[Device, ...], host: Host) -> tuple[Device, ...]:
        """Return the devices that a visibility variable lists, as the vendor's runtime reads it.

        By default the list ends at the first entry that names no device or repeats one.
        """
        chosen: list[Device] = []
        for device in known(map(str.strip, listed.split(",")), devices):
            if device in chosen:
                break
            chosen.append(device)
        return tuple(chosen)


def known(entries: Iterable[str], devices: Sequence[Device]) -> Iterator[Device]:
    """Yield the devices of a list up to its first entry that names no device."""
    for entry in entries:
        if (device := named(entry, devices)) is None:
            return
        yield device


def named(entry: str, devices: Sequence[Device]) -> Device | None:
    """Return the device with an index, or with a unique prefix of its UUID; None if there is none."""
    if entry.isascii() and entry.isdecimal():
        return next((device for device in devices if device.index == int(entry)), None)
    matches = [device for device in devices if entry and device.uuid and device.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
