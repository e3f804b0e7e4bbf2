"""The moment of a frame by its device's clock, where that can be believed."""

from __future__ import annotations

from typing import Final

# A buffer is not older than this, in seconds; a greater age is one of another clock.
_OLDEST: Final = 2.0


def taken_at(told: float, arrived: float) -> float:
    """Return when a frame was taken, on `time.monotonic`.

    Args:
        told: the moment by the device.
        arrived: when the frame arrived, which holds where the device's moment is later, or far earlier.
    """
    return told if arrived - _OLDEST <= told <= arrived else arrived
