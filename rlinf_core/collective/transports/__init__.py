"""Transports of the large parts of a message to the other side: one file each."""
