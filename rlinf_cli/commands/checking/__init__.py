"""Commands that check and explain a file, without touching a machine."""
