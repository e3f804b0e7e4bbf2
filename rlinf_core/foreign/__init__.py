"""Checks of untrusted input: files, replies, connections and text."""
