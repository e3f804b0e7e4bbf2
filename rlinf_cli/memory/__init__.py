"""Forecasts of memory beside measurements."""
