"""Advice on placements: estimated step times from the records of runs, and the fastest legal placements."""
