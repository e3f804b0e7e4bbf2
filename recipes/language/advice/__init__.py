"""The flow of the recipes of language models in virtual time, for advice on their placement."""
