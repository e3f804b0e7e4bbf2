"""The `rlinf` command."""
