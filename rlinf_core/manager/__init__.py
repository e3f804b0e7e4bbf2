"""The manager of a job, one actor: who is in it, who waits for whom, who owns what."""
