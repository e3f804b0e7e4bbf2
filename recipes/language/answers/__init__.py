"""Answers: as returned by engines, as groups for scoring, and as flat batches for training."""
