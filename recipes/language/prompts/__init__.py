"""Prompts: the plan of a step, the curriculum, and the messages to workers."""
