"""The training loop of language models: generation, arrivals, recovery, evaluation, checkpoints, and the runner."""
