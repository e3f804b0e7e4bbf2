"""Commands about machines: from options and records to nodes."""
