"""A run from beginning to end: `rlinf train` and what it leaves for other commands."""
