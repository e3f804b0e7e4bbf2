"""Sums of forecast memory, and measured peaks."""
