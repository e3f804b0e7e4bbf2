"""The accelerators of each vendor, their registry, and the machine on which they are detected."""

from __future__ import annotations

import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from rlinf_core.errors import ConfigError
from rlinf_core.suggest import did_you_mean, quoted

# A driver reset can block the vendor's tool for minutes; after this time, device files are used instead.
_LIMIT_S = 10.0


def run_tool(command: Sequence[str]) -> str | None:
    """Return the standard output of a vendor's tool, or None if it is missing, fails or takes longer than 10 s."""
    try:
        done = subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=_LIMIT_S
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
        for device in _known(map(str.strip, listed.split(",")), devices):
            if device in chosen:
                break
            chosen.append(device)
        return tuple(chosen)


def _known(entries: Iterable[str], devices: Sequence[Device]) -> Iterator[Device]:
    """Yield the devices of a list up to its first entry that names no device."""
    for entry in entries:
        if (device := _named(entry, devices)) is None:
            return
        yield device


def _named(entry: str, devices: Sequence[Device]) -> Device | None:
    """Return the device with an index, or with a unique prefix of its UUID; None if there is none."""
    if entry.isascii() and entry.isdecimal():
        return next((device for device in devices if device.index == int(entry)), None)
    matches = [device for device in devices if entry and device.uuid and device.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


_QUERY = ("nvidia-smi", "--query-gpu=index,name,uuid", "--format=csv,noheader")
_LIST = ("nvidia-smi", "-L")
# The MIG instances of a divided GPU are folders `gpuN/mig/giN`.
_CAPABILITIES: Final = "/proc/driver/nvidia/capabilities"
# A number as `strtoul` reads it: after blanks and a sign, up to the first other character.
_NUMBER: Final = re.compile(r"\s*\+?([0-9]+)")


def _cuda_list(listed: str, devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the devices of a list as CUDA reads it: up to the first unknown entry; none if a device is repeated."""
    numbers = ((_NUMBER.match(entry), entry) for entry in listed.split(","))
    chosen = tuple(_known((number[1] if number else entry.strip() for number, entry in numbers), devices))
    return chosen if len(set(chosen)) == len(chosen) else ()


class Nvidia(Accelerator):
    """NVIDIA GPUs, detected with nvidia-smi, which respects containers, or with device files if it is missing."""

    name = "NVIDIA"
    visibility_variable = "CUDA_VISIBLE_DEVICES"
    torch_device = "cuda"
    models = ("nvidia", "geforce", "rtx", "tesla", "quadro")

    def devices(self, host: Host) -> tuple[Device, ...]:
        # Without devices the tool takes a second, while a missing device file shows it at once. /dev/dxg is WSL's.
        if not host.exists("/dev/nvidiactl") and not host.exists("/dev/dxg"):
            return ()
        listed = host.run(_QUERY)
        devices = _from_tool(listed) if listed is not None else _from_files(host)
        return _with_instances(devices, host) if _has_instances(host) else devices

    def _listed(self, listed: str, devices: tuple[Device, ...], host: Host) -> tuple[Device, ...]:
        entries = [entry.strip() for entry in listed.split(",")]
        if not entries[0].startswith("MIG-"):
            return _cuda_list(listed, devices)
        # CUDA shows a process only the first listed instance.
        return () if entries[0] in entries[1:] else _instance(entries[0], devices, host)


def _instance(uuid: str, devices: tuple[Device, ...], host: Host) -> tuple[Device, ...]:
    """Return a MIG instance with the index and model of its GPU; empty if the tool does not list it."""
    known, gpu = _instances(host), devices[0].index if devices else 0
    parent = _named(str(gpu if known is None else known.get(uuid, "")), devices)
    return () if parent is None else (Device(parent.index, parent.model, uuid, divided=True),)


def _instances(host: Host) -> dict[str, int] | None:
    """Return the GPU's index for the UUID of each MIG instance; None if the tool fails."""
    listed = host.run(_LIST)
    if listed is None:
        return None
    instances: dict[str, int] = {}
    gpu = 0
    for line in listed.splitlines():
        if heading := re.match(r"GPU ([0-9]+):", line):
            gpu = int(heading[1])
        elif instance := re.search(r"\(UUID: (MIG-[^)]+)\)", line):
            instances[instance[1]] = gpu
    return instances


def _has_instances(host: Host) -> bool:
    """Return whether any GPU is divided into instances, faster than the tool, which takes a second to list none."""
    gpus = host.names(_CAPABILITIES)
    return any(name.startswith("gi") for gpu in gpus for name in host.names(f"{_CAPABILITIES}/{gpu}/mig"))


def _with_instances(devices: tuple[Device, ...], host: Host) -> tuple[Device, ...]:
    """Return the GPUs with their MIG instances added to their marks, so that a claim on a GPU covers its instances."""
    gpus = _instances(host) or {}
    parts = {gpu: tuple(uuid for uuid, parent in gpus.items() if parent == gpu) for gpu in gpus.values()}
    return tuple(
        replace(device, marks=(*device.identities, *parts[device.index])) if device.index in parts else device
        for device in devices
    )


def _from_tool(listed: str) -> tuple[Device, ...]:
    devices: list[Device] = []
    for line in listed.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdecimal():
            devices.append(Device(int(cells[0]), cells[1] or None, cells[2] or None))
    return tuple(sorted(devices, key=lambda device: device.index))


def _from_files(host: Host) -> tuple[Device, ...]:
    """Return the devices of the device files, renumbered from 0, as the driver does in a container."""
    known = [_information(host, name) for name in host.names("/proc/driver/nvidia/gpus")]
    minors = host.numbered("/dev", "nvidia")
    if len(known) != len(minors):
        known = [(None, None)] * len(minors)
    return tuple(Device(index, model, uuid) for index, (model, uuid) in enumerate(known))


def _information(host: Host, bus_id: str) -> tuple[str | None, str | None]:
    """Return the model and the UUID of a GPU, each None if the driver does not know it."""
    lines = (host.read(f"/proc/driver/nvidia/gpus/{bus_id}/information") or "").splitlines()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    uuid = values.get("GPU UUID", "")
    # The driver writes question marks before a process has opened the GPU.
    return values.get("Model") or None, None if "?" in uuid else uuid or None


_NODES = "/sys/class/kfd/kfd/topology/nodes"


class Amd(Accelerator):
    """AMD GPUs, detected by the compute driver's topology in sysfs, in HIP's order."""

    name = "AMD"
    visibility_variable = "HIP_VISIBLE_DEVICES"
    torch_device = "cuda"  # torch's ROCm build keeps the name
    models = ("amd", "instinct", "mi2", "mi3", "radeon")

    def devices(self, host: Host) -> tuple[Device, ...]:
        if not host.exists("/dev/kfd"):
            return ()
        devices: list[Device] = []
        for node in host.names(_NODES):
            properties = _properties(host.read(f"{_NODES}/{node}/properties") or "")
            # CPUs are in the same list, without SIMD units. A container sees every GPU here, but can open only those
            # whose render nodes it has.
            if properties.get("simd_count", "0") == "0":
                continue
            minor = properties.get("drm_render_minor")
            if minor is None or host.exists(f"/dev/dri/renderD{minor}"):
                number = properties.get("unique_id", "0")
                uuid = f"GPU-{int(number):016x}" if number.isdecimal() and int(number) else None
                model = host.read(f"{_NODES}/{node}/name") or None
                devices.append(Device(len(devices), model, uuid, marks=(f"kfd{node}",)))
        return tuple(devices)

    def available(self, host: Host, environ: Mapping[str, str]) -> tuple[Device, ...]:
        """See `Accelerator`. ROCR_VISIBLE_DEVICES applies first and renumbers the devices; then HIP_VISIBLE_DEVICES
        applies, or if it is unset or empty CUDA_VISIBLE_DEVICES.
        """
        devices, lower = self.devices(host), environ.get("ROCR_VISIBLE_DEVICES")
        if lower is not None:
            shown = super()._listed(lower, devices, host)
            devices = tuple(replace(device, index=index) for index, device in enumerate(shown))
        lists = (environ.get("HIP_VISIBLE_DEVICES"), environ.get("CUDA_VISIBLE_DEVICES"))
        if lists == (None, None):
            return devices
        return self._listed(lists[0] or lists[1] or "", devices, host)

    def _listed(self, listed: str, devices: tuple[Device, ...], host: Host) -> tuple[Device, ...]:
        """See `Accelerator`. HIP ignores repeated devices, and rejects numbers with leading zeros."""
        entries = ("" if entry.startswith("0") and entry != "0" else entry for entry in listed.split(","))
        return tuple(dict.fromkeys(_known(entries, devices)))


def _numbered(host: Host, prefix: str) -> tuple[Device, ...]:
    """Return a device for each device file, whose number is the machine's even in a container."""
    return tuple(Device(index, marks=(str(number),)) for index, number in enumerate(host.numbered("/dev", prefix)))


def _properties(text: str) -> dict[str, str]:
    """Return the values of the lines `name value`, by name."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


class Ascend(Accelerator):
    """Ascend NPUs, detected by device files: a container sees only its own, and the runtime numbers them from 0."""

    name = "Ascend"
    visibility_variable = "ASCEND_RT_VISIBLE_DEVICES"
    torch_device = "npu"
    models = ("ascend", "910", "310", "atlas")

    def devices(self, host: Host) -> tuple[Device, ...]:
        return _numbered(host, "davinci")

    def _listed(self, listed: str, devices: tuple[Device, ...], host: Host) -> tuple[Device, ...]:
        """See `Accelerator`. CANN reads up to the first character that is neither a digit nor a comma."""
        return super()._listed(re.split(r"[^0-9,]", listed)[0], devices, host)


class Musa(Accelerator):
    """MUSA GPUs, detected by device files: a container sees only its own, and the runtime numbers them from 0."""

    name = "MUSA"
    visibility_variable = "MUSA_VISIBLE_DEVICES"
    torch_device = "musa"
    models = ("mtt", "s4000", "s5000", "s80", "s3000")

    def devices(self, host: Host) -> tuple[Device, ...]:
        return _numbered(host, "mtgpu.")

    def _listed(self, listed: str, devices: tuple[Device, ...], host: Host) -> tuple[Device, ...]:
        return _cuda_list(listed, devices)


_DRM = "/sys/class/drm"


class Intel(Accelerator):
    """Intel GPUs, detected by render nodes, one per card: tiles are not distinguished.

    Integrated graphics, always on bus 0 of the CPU's own root, do not count.
    """

    name = "Intel"
    visibility_variable = "ZE_AFFINITY_MASK"
    torch_device = "xpu"
    models = ("intel", "data center gpu", "max 1", "flex", "arc")

    def devices(self, host: Host) -> tuple[Device, ...]:
        devices: list[Device] = []
        for name in (f"renderD{minor}" for minor in host.numbered(_DRM, "renderD")):
            card = f"{_DRM}/{name}/device"
            vendor = host.read(f"{card}/vendor") if host.exists(f"/dev/dri/{name}") else None
            if vendor == "0x8086" and not host.resolve(card).startswith("0000:00:"):
                devices.append(Device(len(devices), marks=(name,)))
        return tuple(devices)


class NoAccelerator(Accelerator):
    """The absence of accelerators, as a null object."""

    name = "none"
    visibility_variable = None
    torch_device = "cpu"

    def devices(self, host: Host) -> tuple[Device, ...]:
        return ()


NONE = NoAccelerator()
# On a node with devices of several vendors the first vendor wins, so dedicated compute devices come first.
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
        ConfigError: no vendor has that name.
    """
    accelerator = _ACCELERATORS.get(name)
    if accelerator is None:
        names = quoted(_ACCELERATORS)
        raise ConfigError(f"unknown accelerator `{name}`", help=did_you_mean(name, _ACCELERATORS) or f"known: {names}")
    return accelerator


def accelerator_of_model(model: str | None) -> Accelerator:
    """Return the vendor of an accelerator model by its name; NVIDIA for an unknown name."""
    name = (model or "").casefold()
    vendors = (accelerator for accelerator in _ACCELERATORS.values() if name.startswith(accelerator.models))
    return next(vendors, _ACCELERATORS[Nvidia.name])


def find_accelerators(host: Host | None = None, environ: Mapping[str, str] | None = None) -> Found:
    """Return the accelerators that a process with `environ` (by default this one) may use on `host`, or `NONE`."""
    host = Host() if host is None else host
    environ = os.environ if environ is None else environ
    for accelerator in _ACCELERATORS.values():
        devices = accelerator.available(host, environ)
        if devices:
            return Found(accelerator, devices)
    return Found(NONE, ())
