"""Conversations: their tokens, the model's interface for agents, and built-in agents."""
