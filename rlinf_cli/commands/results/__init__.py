"""Commands for the results of runs."""
