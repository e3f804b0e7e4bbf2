"""Runners, and the data of a run: run folder, metrics, checkpoints, trace."""
