"""The workers: agents, engines that draw their turns, and the index of `search`."""
