"""The hardware of nodes: accelerators, which are found, and robots, which are declared. Two registries."""
