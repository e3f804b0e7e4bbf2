"""The configuration of the agent recipe."""
