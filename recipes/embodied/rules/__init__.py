"""Rules between the values of a file, and what can be known of its machines and folders before a run."""
