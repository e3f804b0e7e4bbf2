"""A job's placement as tables, trees, pictures and records."""
