"""Sections of a file that every recipe has, and shared value types."""
