"""Trained policies in use: evaluated, played, exported, recorded, loaded."""
