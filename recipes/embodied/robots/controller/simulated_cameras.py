"""Simulated cameras of an arm: only the timestamps of frames exist, for checks and watchdogs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

FRAME_SECONDS: Final = 1 / 30


class SimulatedCameras:
    """Cameras that take 30 frames a second until they freeze.

    Args:
        serials: their serial numbers.
    """

    def __init__(self, serials: Iterable[str] = ()) -> None:
        self._frozen: dict[str, float | None] = dict.fromkeys(serials)

    def freeze(self, serial: str, now: float) -> None:
        """Let a camera take no frame after this moment."""
        self._frozen[serial] = now

    def ages(self, now: float) -> dict[str, float]:
        """Return the seconds since the newest frame of each camera."""
        newest = {serial: now if end is None else min(end, now) for serial, end in self._frozen.items()}
        return {serial: now - moment // FRAME_SECONDS * FRAME_SECONDS for serial, moment in newest.items()}
