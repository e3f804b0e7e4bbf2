"""Tasks of agents, their tools, and warm-start examples."""
