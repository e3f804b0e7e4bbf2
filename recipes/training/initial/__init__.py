"""The first weights of models that no rank ever holds whole: built without memory, spread, then filled by the shard."""
