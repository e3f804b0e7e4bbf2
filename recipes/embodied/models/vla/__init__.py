"""Policies from folders of published weights: pi0, pi0.5, SmolVLA, OpenVLA, and those of lerobot."""
