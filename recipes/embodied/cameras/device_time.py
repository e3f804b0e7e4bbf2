"""The moment of a frame by its device's clock, where that can be believed."""

from __future__ import annotations

from typing import Final

# A buffer is not older than this, in seconds; a greater age is one of another clock.
_OLDEST: Final = 2.0


def taken_at(device_time: float, arrived: float) -> float:
    """Return when a frame was taken, on `time.monotonic`.

    Args:
        device_time: the time by the device's clock.
        arrived: the arrival time of the frame, used where the device's time is later, or far earlier.
    """
    return device_time if arrived - _OLDEST <= device_time <= arrived else arrived
