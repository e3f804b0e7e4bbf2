"""Simulators that raise, and numbers that are not finite."""
