"""The terminal: streams, signals, paragraphs, and files that a command writes."""
