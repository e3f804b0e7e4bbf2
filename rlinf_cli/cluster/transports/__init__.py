"""The transports to nodes (ssh or a child process), and requests to the agent there."""
