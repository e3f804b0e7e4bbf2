"""The ways to a node: ssh or a child process, and asking the agent there."""
