"""The recipes: one folder each, with its configuration, its workers and its program."""
