"""Environments of the gymnasium interface: single, vectorised, and of Gymnasium-Robotics."""
