"""A person at another machine, over TCP."""
