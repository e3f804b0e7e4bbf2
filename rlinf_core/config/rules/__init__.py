"""Rules that relate places of the `cluster` section, and point at both: ranks within bounds, overlaps, unique names."""
