"""Pieces that recipes of language models share: batches, engines, rewards, data, models."""

from __future__ import annotations

from rlinf_core.process.public_names import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
