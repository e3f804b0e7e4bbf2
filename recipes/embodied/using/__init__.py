"""Trained policies in use: evaluated, played, exported, recorded, loaded; and whole episodes collected without training."""
