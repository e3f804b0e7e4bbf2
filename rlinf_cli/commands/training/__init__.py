"""Commands of a run that is going on."""
