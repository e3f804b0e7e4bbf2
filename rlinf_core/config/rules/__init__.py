"""Rules that relate places of the `cluster` section: ranks within bounds, overlaps, unique names.

The models judge each value by itself; these rules judge values against each other, and point at both.
"""
