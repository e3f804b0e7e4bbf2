"""YAML with positions: bytes to a tree, and words for its mistakes."""
