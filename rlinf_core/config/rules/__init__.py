"""Rules on relations within the `cluster` section: ranks in bounds, overlaps, unique names."""
