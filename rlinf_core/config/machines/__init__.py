"""The `cluster` section: nodes, groups, hosts, and what a command assumes of them."""
