"""Isolated runs of programs that a model wrote, for the tool `python` and for rewards by tests."""
