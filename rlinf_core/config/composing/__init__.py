"""Composition of files, overrides and references into one tree, and the origins of values."""
