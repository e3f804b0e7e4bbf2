"""The flow of the recipe in virtual time, for advice on its placement."""
