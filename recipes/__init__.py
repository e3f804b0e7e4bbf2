"""What can be trained: one folder a recipe, each with its configuration, its workers and its program."""
