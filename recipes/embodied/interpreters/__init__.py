"""Interpreters of simulators: made from locks, and tried before a job needs them."""
