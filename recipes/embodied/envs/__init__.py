"""Environments, batched, behind one interface. No module here needs torch."""
