"""Cameras of real robots: one interface, its drivers, and the newest frames with their ages."""
