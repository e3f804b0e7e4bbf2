"""Programs that a model wrote, run apart from everything else: the tool `python`, and rewards by tests."""
