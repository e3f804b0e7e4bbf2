"""Accelerators that are lock files, as `register_accelerator` takes them."""

from __future__ import annotations

import os

from stand_in_devices import VISIBLE

from rlinf_core.hardware.accelerators import Accelerator, Device, Host


class StandAccelerator(Accelerator):
    """Devices of no vendor whose tensors are on the CPU: four, or as many as the environment says."""

    # A test that claims its devices has its own vendor.
    name = os.environ.get("STAND_IN_VENDOR", "STAND")
    visibility_variable = VISIBLE
    torch_device = "cpu"
    models = ("stand",)

    def devices(self, host: Host) -> tuple[Device, ...]:
        model = os.environ.get("STAND_IN_MODEL", "STAND")
        return tuple(Device(index, model) for index in range(int(os.environ.get("STAND_IN_DEVICES", "4"))))
