"""The current process: imports, memory, signals, pending operations."""
