"""The workers: actors that train, rollout workers that act, env workers that step environments."""
