"""Rules for keys of other projects' files whose values change, or that depend on others."""
