"""Rendering of results: plain data in, plain strings out."""
