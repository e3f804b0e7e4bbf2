"""Interpreters of simulators: made from lock files, and tested before a job needs them."""
