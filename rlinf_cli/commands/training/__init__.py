"""Commands for training and for active runs."""
