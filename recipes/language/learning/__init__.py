"""Learning from answers: advantages, micro-batches and updates."""
