"""Nodes without accelerators."""

from __future__ import annotations

from rlinf_core.hardware.accelerators.accelerator import Accelerator, Device
from rlinf_core.hardware.accelerators.host import Host


class NoAccelerator(Accelerator):
    """The absence of accelerators, as a null object."""

    name = "none"
    visibility_variable = None
    torch_device = "cpu"

    def devices(self, host: Host) -> tuple[Device, ...]:
        return ()
