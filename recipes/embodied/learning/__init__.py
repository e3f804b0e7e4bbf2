"""Learning from trajectories and demonstrations: batches, losses and updates of the policy."""
