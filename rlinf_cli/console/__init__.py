"""The terminal: streams, signals, paragraphs, and output files."""
