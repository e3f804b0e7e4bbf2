"""The hardware of nodes: accelerators, which are detected, and robots, which are declared. Two registries."""
