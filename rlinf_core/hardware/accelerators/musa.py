"""Moore Threads GPUs."""

from __future__ import annotations

from rlinf_core.hardware.accelerators.accelerator import Accelerator, Device
from rlinf_core.hardware.accelerators.host import Host


class Musa(Accelerator):
    """Counted by device files; a container sees those it was given, and the runtime numbers them from 0."""

    name = "MUSA"
    visibility_variable = "MUSA_VISIBLE_DEVICES"
    torch_device = "musa"
    models = ("mtt", "s4000", "s5000", "s80", "s3000")

    def devices(self, host: Host) -> tuple[Device, ...]:
        return tuple(Device(index) for index, _ in enumerate(host.numbered("/dev", "mtgpu.")))
