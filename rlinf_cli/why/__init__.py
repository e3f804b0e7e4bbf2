"""The causes of a run's failure, or of its not learning, found in its folder alone."""
