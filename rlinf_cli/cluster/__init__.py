"""Bringing heterogeneous machines up as one cluster, inspecting and cleaning them up. Imports neither ray nor torch."""
