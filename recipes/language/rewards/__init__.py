"""Scores of answers by rule."""
