"""One tree of several files, overrides and references, and where each value came from."""
