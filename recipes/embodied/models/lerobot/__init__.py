"""Policies of lerobot, by the interface that all of them have."""
