"""Readers of untrusted files as data: nothing in a file is imported, called or executed."""
