"""The workers: actors, critics and references that evaluate tokens; engines that draw them; scorers."""
