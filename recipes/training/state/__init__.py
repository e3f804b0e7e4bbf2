"""The training state of one rank, and how it is saved."""
