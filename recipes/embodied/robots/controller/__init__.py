"""A robot controller: the process next to an arm, here with a simulated arm."""
