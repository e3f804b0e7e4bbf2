"""Commands that check and explain a file, without connecting to a machine."""
