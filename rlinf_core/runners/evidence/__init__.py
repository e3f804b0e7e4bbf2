"""Evidence of failures: what is collected while the processes of a run still live, and how it is kept."""
