"""Rules between the values of a file of a language model's recipe."""
