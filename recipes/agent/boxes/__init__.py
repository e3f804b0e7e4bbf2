"""Boxes: containers without root and without a daemon, each held by a process that ends with its owner."""
