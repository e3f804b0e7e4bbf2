"""Adapters of third-party simulators, imported on demand."""
