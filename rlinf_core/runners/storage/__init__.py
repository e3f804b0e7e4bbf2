"""The folder of a run: state, checkpoints, policies, durable writes."""
