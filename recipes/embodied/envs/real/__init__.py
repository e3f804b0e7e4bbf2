"""Environments of real robots: Franka arms, and robots with a user-written driver."""
