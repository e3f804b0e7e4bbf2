"""Intel GPUs."""

from __future__ import annotations

from rlinf_core.hardware.accelerators.accelerator import Accelerator, Device
from rlinf_core.hardware.accelerators.host import Host

_DRM = "/sys/class/drm"
_VENDOR = "0x8086"


class Intel(Accelerator):
    """Counted by render nodes, one a card: the tiles of a card are not told apart.

    Graphics inside a processor don't count. They always sit on bus 0 of the processor's own root, where no card does;
    otherwise every laptop would pass for a node with an accelerator.
    """

    name = "Intel"
    visibility_variable = "ZE_AFFINITY_MASK"
    torch_device = "xpu"
    models = ("intel", "data center gpu", "max 1", "flex", "arc")

    def devices(self, host: Host) -> tuple[Device, ...]:
        cards = [
            f"{_DRM}/renderD{minor}/device"
            for minor in host.numbered(_DRM, "renderD")
            if host.exists(f"/dev/dri/renderD{minor}")
        ]
        discrete = [card for card in cards if host.read(f"{card}/vendor") == _VENDOR and not _is_built_in(host, card)]
        return tuple(Device(index) for index, _ in enumerate(discrete))


def _is_built_in(host: Host, card: str) -> bool:
    return host.resolve(card).startswith("0000:00:")
