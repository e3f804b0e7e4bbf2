"""Hardware other than accelerators, by the `type` of a node group: one module per robot."""
