"""Sections of a file that several recipes share, and the rules between their values."""
