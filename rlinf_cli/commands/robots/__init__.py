"""Commands for a person in front of an arm."""
