"""Initial weights of models that no rank ever holds whole: built without memory, sharded, then filled by shard."""
