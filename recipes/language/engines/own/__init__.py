"""The engine of this project: rows that decode together, with a key-value cache."""
