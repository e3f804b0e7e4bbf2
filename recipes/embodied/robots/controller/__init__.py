"""A robot controller, the process next to an arm; here also with a simulated arm."""
