"""This process: imports, memory, signals, pending operations."""
