"""The agent that runs on a node. Standard library only."""
