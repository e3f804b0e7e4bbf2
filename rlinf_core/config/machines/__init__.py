"""The `cluster` section: nodes, groups, hosts, and `--assume`."""
