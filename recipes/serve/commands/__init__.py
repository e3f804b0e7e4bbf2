"""Commands of the training service."""
