"""The training loop of agents."""
