"""Replay buffers of off-policy learning: transitions in memory, sampling, several sources, and recordings on disk."""
