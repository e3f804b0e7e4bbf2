"""A robot controller: the process beside an arm, here with a simulated arm."""
