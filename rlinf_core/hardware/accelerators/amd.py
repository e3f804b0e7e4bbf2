"""AMD GPUs."""

from __future__ import annotations

from rlinf_core.hardware.accelerators.accelerator import Accelerator, Device
from rlinf_core.hardware.accelerators.host import Host

_NODES = "/sys/class/kfd/kfd/topology/nodes"


class Amd(Accelerator):
    """Counted by the compute driver's own topology in sysfs, in the order in which HIP numbers them."""

    name = "AMD"
    visibility_variable = "HIP_VISIBLE_DEVICES"
    torch_device = "cuda"  # torch's ROCm build keeps the name
    models = ("amd", "instinct", "mi2", "mi3", "radeon")

    def devices(self, host: Host) -> tuple[Device, ...]:
        if not host.exists("/dev/kfd"):
            return ()
        found: list[Device] = []
        for node in host.names(_NODES):
            properties = _properties(host.read(f"{_NODES}/{node}/properties") or "")
            # Processors stand in the same list; they have no SIMD units. A container sees every GPU here, but can
            # open only those whose render node it was given.
            if properties.get("simd_count", "0") == "0":
                continue
            minor = properties.get("drm_render_minor")
            if minor is None or host.exists(f"/dev/dri/renderD{minor}"):
                found.append(Device(len(found), host.read(f"{_NODES}/{node}/name") or None))
        return tuple(found)


def _properties(text: str) -> dict[str, str]:
    """Return `name value` by line."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
