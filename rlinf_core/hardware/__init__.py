"""The hardware of nodes, with a registry of detected accelerators and one of declared robots."""
