"""Validation of a tree against models: translated pydantic errors, unknown keys, names of related projects."""
