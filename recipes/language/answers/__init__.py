"""Answers: as engines return them, as groups that are scored, as flat batches that are trained on."""
