"""Simulators in separate processes, each with one or several environments."""
