"""Sections of a file that every recipe has, and the small types that sections are made of."""
