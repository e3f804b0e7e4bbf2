"""Trained policies in use: evaluated, played, exported, recorded, loaded; and episodes without training."""
