"""Accelerators that are lock files, as `register_accelerator` takes them."""

from __future__ import annotations

import os

from stand_in_devices import VISIBLE

from rlinf_core.hardware.accelerator import Accelerator, Device, Host


class StandAccelerator(Accelerator):
    """Four devices of no vendor, or as many as the environment says, whose tensors are on the CPU."""

    # A test that claims its devices has its own vendor.
    name = os.environ.get("STAND_IN_VENDOR", "STAND")
    visibility_variable = VISIBLE
    torch_device = "cpu"
    models = ("stand",)

    def devices(self, host: Host) -> tuple[Device, ...]:
        return tuple(Device(index, "STAND") for index in range(int(os.environ.get("STAND_IN_DEVICES", "4"))))
