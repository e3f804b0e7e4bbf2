"""The workers of language recipes: actors, critics, references, rollout, reward and judge workers."""
