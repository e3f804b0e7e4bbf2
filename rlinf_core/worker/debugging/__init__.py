"""Debugging of workers: breakpoints that a terminal attaches to, and profiles."""
