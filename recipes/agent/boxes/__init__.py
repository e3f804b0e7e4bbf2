"""Boxes: rootless containers without a daemon, each held by a process that ends with its owner."""
