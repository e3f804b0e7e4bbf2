"""Agents written with frameworks, and the functions that train them."""
