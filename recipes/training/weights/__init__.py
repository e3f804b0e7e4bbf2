"""Weights on their way from actors to rollout workers."""
