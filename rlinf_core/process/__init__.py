"""This process: its imports, its memory, its signals, and what it is doing."""
