"""Optimizers: which weights they update and how, and moments of eight bits."""
