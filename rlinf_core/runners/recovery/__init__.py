"""Recovery of a run: who failed, who is suspected, snapshots, and starting everything again."""
