"""Batched environments behind one interface. No module here needs torch."""
