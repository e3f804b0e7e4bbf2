"""Forecasts of the memory of a job's processes."""
