"""Policies of lerobot, through their common interface."""
