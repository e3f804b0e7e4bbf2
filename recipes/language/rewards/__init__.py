"""Scoring of answers by rules, functions and programs."""
