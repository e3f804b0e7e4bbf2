"""A lab: an environment, a model, a reward and a recipe, each with a job file and a test beside it."""
