"""The relations between places of the `cluster` section: ranks within bounds, overlaps, names that must be unique.

The models judge each value by itself; these rules judge values against each other, and point at both.
"""
