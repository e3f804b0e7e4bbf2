"""A job: a configuration file read, checked and understood, with the recipe it selects."""
