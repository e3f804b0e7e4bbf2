"""Simulators in processes of their own, one or several environments each."""
