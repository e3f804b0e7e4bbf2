"""Runners, and what they keep of a run: the run folder, metrics, checkpoints, the curve, the trace."""
