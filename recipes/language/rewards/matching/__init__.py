"""Comparison of answers with ground truth, read as numbers, units, regions and sets."""
