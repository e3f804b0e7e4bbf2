"""Adapters to simulators that are packages of their own, each imported when it is constructed."""
