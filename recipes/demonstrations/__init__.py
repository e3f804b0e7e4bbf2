"""Demonstrations on disk: reads and writes LeRobotDataset folders, and reads HDF5 files of LIBERO and robomimic."""

from __future__ import annotations

from rlinf_core.process.public_names import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
