"""Configurations to start from. `rlinf train` and `rlinf validate` find them by name."""
