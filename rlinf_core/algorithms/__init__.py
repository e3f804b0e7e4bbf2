"""Advantages, returns, losses and divergences: torch tensors in, tensors out. Nothing here knows of processes."""
