"""Simulated Franka arms of this project: kinematic, with contacts in MuJoCo, seen by cameras."""
