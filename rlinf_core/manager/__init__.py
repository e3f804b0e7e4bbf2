"""What one actor knows about a job: who is in it, who waits for whom, who owns what."""
