"""Validation rules between the values of a language job's configuration."""
