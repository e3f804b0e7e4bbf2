"""What nodes hold: accelerators, which are found, and robots, which are declared. Two registries."""
