"""A job: a loaded and validated configuration file with its recipe."""
