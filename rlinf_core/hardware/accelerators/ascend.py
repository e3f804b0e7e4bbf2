"""Huawei Ascend NPUs."""

from __future__ import annotations

from rlinf_core.hardware.accelerators.accelerator import Accelerator, Device
from rlinf_core.hardware.accelerators.host import Host


class Ascend(Accelerator):
    """Counted by device files; a container sees those it was given, and the runtime numbers them from 0."""

    name = "Ascend"
    visibility_variable = "ASCEND_RT_VISIBLE_DEVICES"
    torch_device = "npu"
    models = ("ascend", "910", "310", "atlas")

    def devices(self, host: Host) -> tuple[Device, ...]:
        return tuple(Device(index) for index, _ in enumerate(host.numbered("/dev", "davinci")))
