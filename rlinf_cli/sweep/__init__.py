"""Sweeps: one file trained with several values and seeds, as a queue of runs in one folder."""
