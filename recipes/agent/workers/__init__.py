"""The workers: agents, engines that generate their turns, and the index of `search`."""
