"""Pieces that recipes of language models share: batches, engines, rewards, data, models."""
