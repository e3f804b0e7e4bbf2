"""The causes of a run's failure, or of its not learning, told from its folder alone."""
