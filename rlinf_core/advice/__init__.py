"""Advice on placements: how long a step takes by a run's own record, and which legal placement is the fastest."""
