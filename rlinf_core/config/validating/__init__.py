"""A tree held against models: pydantic's findings in our words, unknown keys, names of related projects."""
