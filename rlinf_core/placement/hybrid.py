"""Jobs whose components share some accelerators and not others."""

from __future__ import annotations

from rlinf_core.placement.component import ComponentPlacement


class HybridComponentPlacement(ComponentPlacement):
    """`ComponentPlacement` under the name that says what to expect: components may share any of their accelerators.

    The maps are read in the same way. A program that needs all components collocated, or none, asks `placement_mode`.
    """
