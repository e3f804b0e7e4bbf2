"""Bringing up, inspecting and cleaning up heterogeneous machines as one cluster. Imports neither ray nor torch."""
