"""Accelerators by vendor: how to find them on a node without torch, and which variable makes them visible."""
