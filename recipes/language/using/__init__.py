"""Uses of trained language models: export and evaluation of checkpoints and of model folders."""
