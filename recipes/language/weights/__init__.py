"""Weights on their way to engines and into folders."""
