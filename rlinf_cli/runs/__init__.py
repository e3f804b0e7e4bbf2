"""Runs that are over or going on: finding them, tables, logs, comparisons."""
