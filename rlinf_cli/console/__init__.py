"""The terminal: streams, signals, folded text, and output files."""
