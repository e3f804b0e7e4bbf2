"""The training state of one rank, and its checkpoints."""
