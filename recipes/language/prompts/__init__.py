"""Prompts: their plan, the curriculum, and messages to workers."""
