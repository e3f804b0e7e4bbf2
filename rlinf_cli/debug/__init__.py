"""Debugging of active runs: the stacks of their processes, and breakpoints."""
