"""The folder of a run: state, checkpoints, evidence, durable writes."""
