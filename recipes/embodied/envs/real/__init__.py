"""Environments of real robots: Franka arms, and robots that a driver of the user's moves."""
