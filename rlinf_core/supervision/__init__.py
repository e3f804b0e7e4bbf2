"""The supervision of a job: which processes live, who waits for whom, and why a run stands still."""
