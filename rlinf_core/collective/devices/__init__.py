"""Transfers between accelerators."""
