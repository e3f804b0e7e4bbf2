"""Simulated Franka arms of this project: kinematic, with contacts in MuJoCo, or observed by cameras."""
