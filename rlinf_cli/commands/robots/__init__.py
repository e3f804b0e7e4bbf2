"""Commands for the operator of an arm."""
