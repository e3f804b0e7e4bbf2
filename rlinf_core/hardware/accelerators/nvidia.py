"""NVIDIA GPUs."""

from __future__ import annotations

from rlinf_core.hardware.accelerators.accelerator import Accelerator, Device
from rlinf_core.hardware.accelerators.host import Host

_QUERY = ("nvidia-smi", "--query-gpu=index,name,uuid", "--format=csv,noheader")


class Nvidia(Accelerator):
    """Counted by nvidia-smi, which sees what a container was given; by device files where it is missing."""

    name = "NVIDIA"
    visibility_variable = "CUDA_VISIBLE_DEVICES"
    torch_device = "cuda"
    models = ("nvidia", "geforce", "rtx", "tesla", "quadro")

    def devices(self, host: Host) -> tuple[Device, ...]:
        # The tool takes a second to say that there is nothing; a device file tells at once. /dev/dxg is WSL's.
        if not host.exists("/dev/nvidiactl") and not host.exists("/dev/dxg"):
            return ()
        listed = host.run(_QUERY)
        return _from_tool(listed) if listed is not None else _from_files(host)


def _from_tool(listed: str) -> tuple[Device, ...]:
    devices: list[Device] = []
    for line in listed.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdecimal():
            devices.append(Device(int(cells[0]), cells[1] or None, cells[2] or None))
    return tuple(sorted(devices, key=lambda device: device.index))


def _from_files(host: Host) -> tuple[Device, ...]:
    """Device minors, renumbered: the driver counts from 0 whatever it was given."""
    models = [_model(host, name) for name in host.names("/proc/driver/nvidia/gpus")]
    minors = host.numbered("/dev", "nvidia")
    if len(models) != len(minors):
        models = [None] * len(minors)
    return tuple(Device(index, model) for index, model in enumerate(models))


def _model(host: Host, bus_id: str) -> str | None:
    for line in (host.read(f"/proc/driver/nvidia/gpus/{bus_id}/information") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model":
            return value.strip() or None
    return None
