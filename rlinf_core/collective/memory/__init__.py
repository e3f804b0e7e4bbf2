"""Shared memory between processes of a node."""
