"""Forecasts of the memory of a job of agents."""
