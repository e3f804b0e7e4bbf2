"""Diagnosis of failed runs, and of runs that do not learn, from the run folder alone."""
