"""Losses of policies and values."""
