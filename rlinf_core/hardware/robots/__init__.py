"""Hardware other than accelerators, by the `type` a node group gives: one module per robot."""
