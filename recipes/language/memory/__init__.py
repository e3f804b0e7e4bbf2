"""Forecasts of the memory of a language model's job."""
