"""Bringing unlike machines up as one cluster, looking at them, and giving them back clean. Neither ray nor torch."""
