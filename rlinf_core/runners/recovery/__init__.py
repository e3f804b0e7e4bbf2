"""Recovery of a run after failures: what failed, who is suspected, snapshots, and starting groups again."""
