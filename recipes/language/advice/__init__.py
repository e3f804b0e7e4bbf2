"""Simulations of the language recipes in virtual time, for advice on placement."""
