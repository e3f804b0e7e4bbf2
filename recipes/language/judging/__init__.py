"""Scores of answers by a model, which workers of their own hold, and the scorer that a file asks for."""
