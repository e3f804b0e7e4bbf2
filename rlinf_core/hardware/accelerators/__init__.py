"""Accelerators by vendor: detection without torch, and visibility variables."""
