"""Forecasts of memory: processes, arithmetic on layers; and freed memory of the host."""
