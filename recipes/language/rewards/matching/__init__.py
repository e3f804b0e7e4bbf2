"""Comparison of answers with gold ones: what an answer says, read as numbers, units, regions and sets."""
