"""Conversations: their tokens, the model that speaks in them, and the agents that lead them."""
