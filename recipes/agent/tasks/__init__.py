"""Tasks of agents, the tools for them, and examples to start from."""
