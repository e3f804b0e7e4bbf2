"""What drives a run: runners, and what they keep of it: the run folder, metrics, checkpoints, the curve, the trace."""
