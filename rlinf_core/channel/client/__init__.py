"""A channel in a process that uses it."""
