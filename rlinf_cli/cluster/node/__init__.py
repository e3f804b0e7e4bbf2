"""The agent that runs on a node, which uses only the standard library."""
