"""The file of the agent recipe."""
