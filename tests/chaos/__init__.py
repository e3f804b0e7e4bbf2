"""Faults planted into runs by seed: what is struck and when, how it is struck, and whether the run ended right."""
